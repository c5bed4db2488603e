"""Speculative sampling of frames with dependent codes, code by code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.targets.frames.frame_distributions import FREE, frame_distribution
from mmspec.verifiers.coupled_frames import accept_frames
from mmspec.verifiers.joint_frames import draw_frames
from mmspec.verifiers.walk import STRIDE, check_draft, ratio


@dataclass(frozen=True)
class DepthFrames(Verifier):
    """Walk codes (frame, book) in order; accept with min(1, p/q), else draw from norm((p - q)+).

    Speculative sampling (Leviathan et al. 2023) of the flat sequence. Its distributions take two
    passes: one of the backbone over drafted frames, one of the depth decoder over their codes. The
    rest of a frame after a rejected code takes steps of the depth decoder, and later frames are
    dropped. Exact, also for independent codes; a frame then passes with prod (1 - TV_k), while
    `JointFrames` accepts more.
    """

    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    decodes: ClassVar[tuple[str, ...]] = ("frames",)
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False)
        distribution = frame_distribution(scores.distribution)
        rows = torch.arange(draft.batch, device=scores.position.device)
        if not draft.nodes:
            return accept_frames(
                draft, torch.zeros_like(rows), draw_frames(distribution[:, 0], noise, Lane.RESIDUAL)
            )
        drafted, x = frame_distribution(draft.distribution), draft.tokens
        p, q = (one.code_distributions(x) for one in (distribution[:, :-1], drafted))
        fixed, is_certain = distribution[:, :-1].fixed_codes, drafted.fixed_codes != FREE
        coded = torch.where(fixed == FREE, x, 0)  # a forced token may be no code
        q_prob = torch.where(is_certain, 1.0, q.prob(coded))
        chance = torch.where(fixed == FREE, ratio(p.prob(coded), q_prob), x == fixed)
        hits = noise.flip(chance, Lane.ACCEPT) & draft.mask[..., None]
        length = hits.all(-1).cumprod(-1).sum(-1)
        node = length.clamp_max(draft.nodes - 1)
        refused = (length < draft.nodes) & draft.mask[rows, node]
        kept = torch.where(refused, hits[rows, node].cumprod(-1).sum(-1), 0)
        rest = p[rows, node].residual(q[rows, node]).probs
        others = p[rows, node].probs.scatter(-1, coded[rows, node, :, None], 0.0)
        rest = torch.where(is_certain[rows, node, :, None], others, rest)

        def draw(one: Categorical, book: int) -> torch.Tensor:
            mine = (refused & (kept == book))[:, None]
            weights = torch.where(mine, rest[:, book], one.probs)
            return noise.pick(weights, Lane.WALK + STRIDE * book)

        return accept_frames(
            draft, length, distribution[rows, length].complete(x[rows, node], kept, draw)
        )
