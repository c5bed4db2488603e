"""Lookup of audio frames: propose what followed a similar earlier frame."""

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
    """Propose the frames after the most similar, most recent earlier frame.

    Similarity is the number of leading codebooks that agree with the last frame: steady sounds
    repeat frames, and codes of the first codebooks recur where later ones do not. No weights;
    proposes nothing where no code of the first codebook recurs. The cost of a lookup is one
    comparison per frame.
    """

    length: int
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def propose(self, context: Frames, state: None) -> Draft:
        count = min(self.length, context.max_draft_frames)
        if not count:
            return context.empty_draft()
        found = [_find_continuation(row, count) for row in context.history]
        if all(one is None for one in found):
            return context.empty_draft()
        blank = torch.zeros(count, context.books, dtype=torch.int64, device=context.device)
        tokens = torch.stack([blank if one is None else _pad_frames(one, blank) for one in found])
        sizes = torch.tensor([0 if one is None else len(one) for one in found])
        mask = torch.arange(count) < sizes[:, None]
        return Draft.chain(tokens, Kind.DET, mask=mask.to(context.device))


def _find_continuation(row: list[Tensor], count: int) -> Tensor | None:  # (n, K)
    """The frames after the best match; None where no earlier frame matches."""
    if len(row) < 2:
        return None
    tokens = torch.stack(row)
    num_shared = (tokens[:-1] == tokens[-1]).cumprod(-1).sum(-1)
    best = int(num_shared.max())
    if not best:
        return None
    at = int((num_shared == best).nonzero()[-1]) + 1
    return tokens[at : at + count]


def _pad_frames(frames: Tensor, blank: Tensor) -> Tensor:
    return torch.cat((frames, blank[len(frames) :]))


def frame_lookup(kit: Kit) -> Drafter:
    """Continuations of earlier frames."""
    return FrameLookup(kit.shape.length.max_length)
