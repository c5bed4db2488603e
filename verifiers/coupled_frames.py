"""Coupled sampling of frames: the target's own codes, drawn with the noise of place and book."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.distributions.noise import Keys, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.targets.frames.frame_distributions import FREE, book_keys, frame_distribution, keyed
from mmspec.verifiers.walk import check


@dataclass(frozen=True)
class CoupledFrames(Verifier):
    """Keep frames whose codes are all the target's own (`Coupled`, code by code).

    The target's code is a function of (seed, row, place, book) and of its distribution given all
    codes before it, so the output is that of plain decoding with the same seed, whatever was
    drafted. In the first frame that differs the codes that agree stay; the rest is the target's,
    and of a depth decoder takes its own small steps.
    """

    lossless: ClassVar[bool] = True
    couples: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET, Kind.IID)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False, distribution=False)
        distribution, keys = frame_distribution(scores.distribution), noise.shared(scores.position)
        rows = torch.arange(draft.batch, device=scores.position.device)
        if not draft.nodes:
            blank = distribution.forced[:, 0].clamp_min(0)
            none = torch.zeros_like(rows)
            return ended(
                draft, none, distribution[:, 0].completed(blank, none, keyed(Keys(keys.key[:, 0])))
            )
        drafted = distribution[:, :-1]
        own = drafted.given(draft.tokens).sample(
            book_keys(Keys(keys.key[:, :-1]), distribution.books)
        )
        own = torch.where(drafted.forced == FREE, own, drafted.forced)
        hits = own == draft.tokens
        length = (hits.all(-1) & draft.mask).cumprod(-1).sum(-1)
        node = length.clamp_max(draft.nodes - 1)
        same = hits[rows, node].cumprod(-1).sum(-1) * (length < draft.nodes)
        draw = keyed(Keys(keys.key[rows, length]))
        return ended(
            draft,
            length,
            distribution[rows, length].completed(draft.tokens[rows, node], same, draw),
        )


def ended(draft: Draft, length: torch.Tensor, frame: torch.Tensor) -> Verdict:
    """The first `length` (B,) frames of a chain, and one more (B, K)."""
    places = torch.arange(draft.nodes, device=length.device).expand(draft.batch, -1)
    return Verdict(torch.where(places < length[:, None], places, -1), length, frame)
