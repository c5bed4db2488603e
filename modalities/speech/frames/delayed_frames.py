"""Frames from the steps of a delay pattern.

book 0, delay 0   a1 a2 a3 E  -- --
book 1, delay 1   -- b1 b2 b3 E  --    E ends speech: it is not decoded, and neither is
book 2, delay 2   -- -- c1 c2 c3 E     what other books have in the steps after it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.targets.frames.frames import NO_END


@dataclass(frozen=True)
class DelayedFrames:
    """Frames from steps in which book k is delayed by `delays[k]` steps.

    Speech ends `latest` steps after `end` in book 0, whose delay is 0, or after `most` steps.
    """

    delays: tuple[int, ...]
    most: int
    end: int = NO_END

    @property
    def latest(self) -> int:
        return max(self.delays)

    def codes(self, tokens: Sequence[Tensor]) -> Tensor:  # (K, T)
        count = self.count_frames(tokens)
        if not count:
            return torch.zeros(len(self.delays), 0, dtype=torch.int64)
        steps = torch.stack(list(tokens))
        books = enumerate(self.delays)
        return torch.stack([steps[delay : delay + count, book] for book, delay in books])

    def count_frames(self, tokens: Sequence[Tensor]) -> int:
        complete = max(min(len(tokens), self.most) - self.latest, 0)
        return complete - self._has_ended(tokens)

    def is_over(self, tokens: Sequence[Tensor]) -> bool:
        return len(tokens) >= self.most or self._has_ended(tokens)

    def cut_at_end(self, steps: Tensor) -> list[Tensor]:  # (S, K)
        """The steps of a padded row up to its last one."""
        ends = (steps[:, 0] == self.end).nonzero()
        return list(steps[: int(ends[0]) + self.latest + 1] if len(ends) else steps)

    def _has_ended(self, tokens: Sequence[Tensor]) -> bool:
        """Whether the last step is that of the end of the most delayed book.

        Then the frame that it completes is the end itself.
        """
        first = len(tokens) - 1 - self.latest
        return first >= 0 and bool(tokens[first][0] == self.end)
