"""Speculative sampling of frames whose codes follow each other: code by code, through frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.targets.frames.frame_distributions import FREE, frame_distribution
from mmspec.verifiers.coupled_frames import ended
from mmspec.verifiers.joint_frames import drawn
from mmspec.verifiers.walk import STRIDE, check, ratio


@dataclass(frozen=True)
class DepthFrames(Verifier):
    """Walk codes (frame, book) in order; accept with min(1, p/q), else draw from norm((p - q)+).

    Speculative sampling (Leviathan et al. 2023) of the flat sequence, whose distributions two
    passes give: one of the backbone over drafted frames, one of the depth decoder over their codes.
    The rest of a frame behind a refused code takes steps of the depth decoder, and frames behind it
    are dropped. Exact, for codes that are independent, too (a frame then has prod (1 - TV_k) to
    pass:
    `JointFrames` accepts more).
    """

    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False)
        distribution = frame_distribution(scores.distribution)
        rows = torch.arange(draft.batch, device=scores.position.device)
        if not draft.nodes:
            return ended(
                draft, torch.zeros_like(rows), drawn(distribution[:, 0], noise, Lane.RESIDUAL)
            )
        p, q = (
            distribution[:, :-1].given(draft.tokens),
            frame_distribution(draft.distribution).given(draft.tokens),
        )
        free, x = distribution[:, :-1].forced == FREE, draft.tokens
        coded = torch.where(free, x, 0)  # what is forced may be no code
        chance = torch.where(free, ratio(p.prob(coded), q.prob(coded)), 1.0)
        hits = noise.flip(chance, Lane.ACCEPT) & draft.mask[..., None]
        length = hits.all(-1).cumprod(-1).sum(-1)
        node = length.clamp_max(draft.nodes - 1)
        refused = (length < draft.nodes) & draft.mask[rows, node]
        kept = torch.where(refused, hits[rows, node].cumprod(-1).sum(-1), 0)
        residual = p[rows, node].residual(q[rows, node])

        def draw(one: Categorical, book: int) -> torch.Tensor:
            mine = (refused & (kept == book))[:, None]
            weights = torch.where(mine, residual.probs[:, book], one.probs)
            return noise.pick(weights, Lane.WALK + STRIDE * book)

        return ended(draft, length, distribution[rows, length].completed(x[rows, node], kept, draw))
