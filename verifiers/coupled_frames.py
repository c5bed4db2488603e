"""Coupled sampling of frames: codes sampled with the noise of position and codebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.distributions.noise import Keys, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.targets.frames.frame_distributions import (
    FREE,
    book_keys,
    frame_distribution,
    keyed_draw,
)
from mmspec.verifiers.walk import check_draft


@dataclass(frozen=True)
class CoupledFrames(Verifier):
    """Accept frames whose codes all equal the target's (`Coupled`, code by code).

    The target's code is a function of (seed, row, position, codebook) and of its distribution given
    all codes before it, so the output is that of plain decoding with the same seed, for any draft.
    In the first frame that differs, the leading equal codes stay and the target generates the rest;
    a depth decoder runs once per code for it.
    """

    lossless: ClassVar[bool] = True
    couples: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    decodes: ClassVar[tuple[str, ...]] = ("frames",)
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET, Kind.IID)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False, distribution=False)
        distribution, keys = (
            frame_distribution(scores.distribution),
            noise.shared_keys(scores.position),
        )
        rows = torch.arange(draft.batch, device=scores.position.device)
        if not draft.nodes:
            blank = distribution.fixed_codes[:, 0].clamp_min(0)
            none = torch.zeros_like(rows)
            return accept_frames(
                draft,
                none,
                distribution[:, 0].complete(blank, none, keyed_draw(Keys(keys.key[:, 0]))),
            )
        drafted = distribution[:, :-1]
        own = drafted.code_distributions(draft.tokens).sample(
            book_keys(Keys(keys.key[:, :-1]), distribution.books)
        )
        own = torch.where(drafted.fixed_codes == FREE, own, drafted.fixed_codes)
        hits = own == draft.tokens
        length = (hits.all(-1) & draft.mask).cumprod(-1).sum(-1)
        node = length.clamp_max(draft.nodes - 1)
        same = hits[rows, node].cumprod(-1).sum(-1) * (length < draft.nodes)
        draw = keyed_draw(Keys(keys.key[rows, length]))
        return accept_frames(
            draft, length, distribution[rows, length].complete(draft.tokens[rows, node], same, draw)
        )


def accept_frames(draft: Draft, length: torch.Tensor, frame: torch.Tensor) -> Verdict:
    """The first `length` (B,) frames of a chain, and one more (B, K)."""
    places = torch.arange(draft.nodes, device=length.device).expand(draft.batch, -1)
    return Verdict(torch.where(places < length[:, None], places, -1), length, frame)
