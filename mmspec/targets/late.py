"""A prompt that is read with its first draft, or never."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mmspec.targets.memory import Memory, RowMemories


class Unread:
    """Stands for the memory of a prompt until somebody asks the target.

    The last token of the prompt waits to be read with the first draft, so that the first new token
    can be drafted, too. Where a gate keeps all that was drafted, nothing is ever read.
    """

    saved = None  # no state to go back to

    def __init__(
        self, slots: int, rows: int, read: Callable[[], tuple[Memory | RowMemories, Tensor]]
    ) -> None:
        self.found: Memory | RowMemories | None = None
        self.logits: Tensor | None = None  # (B, V) behind a prompt that was read by itself
        self._kept = [slots - 1] * rows
        self._read = read

    @property
    def kept(self) -> list[int]:
        return self._kept if self.found is None else self.found.kept

    def opened(self) -> Memory | RowMemories:
        """The memory itself; the first call reads the prompt.

        Raises ValueError for states of recurrent layers, which do not go back by a token.
        """
        if self.found is None:
            found, self.logits = self._read()
            if found.saved is not None:
                raise ValueError(
                    "a draft of the first token needs a memory that goes back by a token, and this "
                    "model keeps a recurrent state; use another recipe"
                )
            found.advance([-1] * len(self._kept))
            self.found = found
        return self.found
