"""Speculative sampling of frames with independent codes: one ratio for the whole frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.targets.frames.frame_distributions import (
    FrameDistribution,
    ParallelDistribution,
    frame_distribution,
)
from mmspec.verifiers.coupled_frames import accept_frames
from mmspec.verifiers.walk import STRIDE, check_draft


@dataclass(frozen=True)
class JointFrames(Verifier):
    """Accept a frame with min(1, prod p_k / q_k), else sample from norm((prod p - prod q)+).

    Speculative sampling (Leviathan et al. 2023) of the vector of codes of a delay pattern: exact. A
    frame is accepted with probability 1 - TV(prod p, prod q), at least prod (1 - TV(p_k, q_k)), the
    acceptance of testing codebook by codebook. The residual has no closed form over V^K frames and
    is sampled by rejection: frames of the target pass with (1 - q / p)+, on average 1 / TV trials
    without a call of the model. Forced codes are certain under both distributions and use no noise.
    Raises RuntimeError if `max_trials` frames are all rejected.
    """

    max_trials: int = 1 << 12
    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    decodes: ClassVar[tuple[str, ...]] = ("frames",)
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False)
        p = as_parallel(scores.distribution)
        rows = torch.arange(draft.batch, device=scores.position.device)
        if not draft.nodes:
            none = torch.zeros_like(rows)
            return accept_frames(draft, none, draw_frames(p[:, 0], noise, Lane.RESIDUAL))
        q = as_parallel(draft.distribution)
        hits = noise.flip(acceptance(p[:, :-1], q, draft.tokens), Lane.ACCEPT) & draft.mask
        length = hits.cumprod(-1).sum(-1)
        node = length.clamp_max(draft.nodes - 1)
        refused = (length < draft.nodes) & draft.mask[rows, node]
        frame = self._residual(p[rows, length], q[rows, node], refused, noise)
        return accept_frames(draft, length, frame)

    def _residual(
        self, p: FrameDistribution, q: FrameDistribution, refused: Tensor, noise: Noise
    ) -> Tensor:
        """Frames (B, K) of the residual where `refused` (B,), else of the target."""
        frame = draw_frames(p, noise, Lane.WALK)
        is_open = refused
        for turn in range(1, self.max_trials):
            lane = Lane.WALK + STRIDE * turn
            chance = torch.ones(len(is_open), dtype=torch.float64, device=is_open.device)
            chance[is_open] = thinning_probability(p[is_open], q[is_open], frame[is_open]).double()
            is_open = is_open & ~noise.flip(chance, lane - 1)
            if not bool(is_open.any()):
                return frame
            frame = torch.where(is_open[:, None], draw_frames(p, noise, lane), frame)
        raise RuntimeError(
            f"{self.max_trials} frames of the target were rejected in a row, which is almost "
            "impossible for different distributions; check the distribution of the drafter"
        )


def acceptance(
    p: FrameDistribution, q: FrameDistribution, frames: Tensor
) -> Tensor:  # (..., K) -> (...)
    """min(1, P / Q) of whole frames."""
    return (p.log_prob(frames) - q.log_prob(frames)).clamp_max(0).exp()


def thinning_probability(
    p: FrameDistribution, q: FrameDistribution, frames: Tensor
) -> Tensor:  # (..., K) -> (...)
    """(1 - Q / P)+: the acceptance that thins the target's frames to the residual."""
    return (1 - (q.log_prob(frames) - p.log_prob(frames)).exp()).clamp_min(0)


def draw_frames(
    distribution: FrameDistribution, noise: Noise, lane: int
) -> Tensor:  # distribution (B,) -> (B, K)
    """Sample frames, with one lane per codebook."""
    blank = distribution.fixed_codes.clamp_min(0)
    return distribution.complete(
        blank, torch.zeros_like(blank[:, 0]), lambda one, book: noise.pick(one.probs, lane + book)
    )


def as_parallel(distribution: object) -> ParallelDistribution:
    """Narrow a distribution to one of independent codes. Raises TypeError for others."""
    found = frame_distribution(distribution)
    if not isinstance(found, ParallelDistribution):
        raise TypeError("the codes of a frame depend on each other here; verify them in depth")
    return found
