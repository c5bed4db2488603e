"""Frames that followed the last one when it was said before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.draft import Draft, Drafter, Kind
from mmspec.recipe import Kit
from mmspec.targets.frames.frames import Frames


@dataclass(frozen=True)
class FrameLookup(Drafter):
    """Propose what followed the nearest earlier frame that shares most codes with the last one.

    Sound that stands still repeats frames, and codes of the first books recur where later ones do
    not. Needs nothing; proposes nothing where no code of the first book recurs. A row's look-up
    grows with what it has said, by one comparison per frame.
    """

    length: int
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def propose(self, context: Frames, state: None) -> Draft:
        count = min(self.length, context.useful)
        if not count:
            return context.nothing()
        found = [_followed(row, count) for row in context.history]
        if all(one is None for one in found):
            return context.nothing()
        blank = torch.zeros(count, context.books, dtype=torch.int64, device=context.device)
        tokens = torch.stack([blank if one is None else _padded(one, blank) for one in found])
        sizes = torch.tensor([0 if one is None else len(one) for one in found])
        mask = torch.arange(count) < sizes[:, None]
        return Draft.chain(tokens, Kind.DET, mask=mask.to(context.device))


def _followed(row: list[Tensor], count: int) -> Tensor | None:  # (n, K)
    """What followed; None where nothing like the last frame was said before."""
    if len(row) < 2:
        return None
    said = torch.stack(row)
    alike = (said[:-1] == said[-1]).cumprod(-1).sum(-1)
    best = int(alike.max())
    if not best:
        return None
    at = int((alike == best).nonzero()[-1]) + 1
    return said[at : at + count]


def _padded(frames: Tensor, blank: Tensor) -> Tensor:
    return torch.cat((frames, blank[len(frames) :]))


def frame_lookup(kit: Kit) -> Drafter:
    """What followed before."""
    return FrameLookup(kit.shape.length.most)
