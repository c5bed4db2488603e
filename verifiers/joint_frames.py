"""Speculative sampling of frames whose codes are independent: one ratio for the whole frame."""

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
from mmspec.verifiers.coupled_frames import ended
from mmspec.verifiers.walk import STRIDE, check


@dataclass(frozen=True)
class JointFrames(Verifier):
    """Accept a frame with min(1, prod p_k / q_k), else draw from norm((prod p - prod q)+).

    Speculative sampling (Leviathan et al. 2023) of the vector of codes of a delay pattern: exact,
    and a frame is accepted with probability 1 - TV(prod p, prod q), at least prod (1 - TV(p_k,
    q_k)), which is what testing codebook by codebook gives. The residual has no closed form over
    V^K frames; it is drawn by rejection: frames of the target are kept with (1 - q / p)+, 1 / TV of
    them on average, without a call of the model. Forced codes are certain under both distributions,
    and take no noise. Raises RuntimeError where `most_tries` frames are all refused.
    """

    most_tries: int = 1 << 12
    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False)
        p = parallel(scores.distribution)
        rows = torch.arange(draft.batch, device=scores.position.device)
        if not draft.nodes:
            none = torch.zeros_like(rows)
            return ended(draft, none, drawn(p[:, 0], noise, Lane.RESIDUAL))
        q = parallel(draft.distribution)
        hits = noise.flip(accept(p[:, :-1], q, draft.tokens), Lane.ACCEPT) & draft.mask
        length = hits.cumprod(-1).sum(-1)
        node = length.clamp_max(draft.nodes - 1)
        refused = (length < draft.nodes) & draft.mask[rows, node]
        frame = self._residual(p[rows, length], q[rows, node], refused, noise)
        return ended(draft, length, frame)

    def _residual(
        self, p: FrameDistribution, q: FrameDistribution, refused: Tensor, noise: Noise
    ) -> Tensor:
        """Frames (B, K): of the residual where `refused` (B,), else the target's own."""
        frame = drawn(p, noise, Lane.WALK)
        waits = refused
        for turn in range(1, self.most_tries):
            lane = Lane.WALK + STRIDE * turn
            chance = torch.ones(len(waits), dtype=torch.float64, device=waits.device)
            chance[waits] = keep(p[waits], q[waits], frame[waits]).double()
            waits = waits & ~noise.flip(chance, lane - 1)
            if not bool(waits.any()):
                return frame
            frame = torch.where(waits[:, None], drawn(p, noise, lane), frame)
        raise RuntimeError(
            f"{self.most_tries} frames of the target were refused in a row, which the residual of "
            "two different distributions all but excludes; look at the drafter's distribution"
        )


def accept(
    p: FrameDistribution, q: FrameDistribution, frames: Tensor
) -> Tensor:  # (..., K) -> (...)
    """min(1, P / Q) of whole frames."""
    return (p.log_prob(frames) - q.log_prob(frames)).clamp_max(0).exp()


def keep(p: FrameDistribution, q: FrameDistribution, frames: Tensor) -> Tensor:  # (..., K) -> (...)
    """(1 - Q / P)+: what thins the target's frames to those of the residual."""
    return (1 - (q.log_prob(frames) - p.log_prob(frames)).exp()).clamp_min(0)


def drawn(
    distribution: FrameDistribution, noise: Noise, lane: int
) -> Tensor:  # distribution (B,) -> (B, K)
    """Frames of a distribution, a lane per book."""
    blank = distribution.forced.clamp_min(0)
    return distribution.completed(
        blank, torch.zeros_like(blank[:, 0]), lambda one, book: noise.pick(one.probs, lane + book)
    )


def parallel(distribution: object) -> ParallelDistribution:
    """Narrow a distribution to one of independent codes."""
    found = frame_distribution(distribution)
    if not isinstance(found, ParallelDistribution):
        raise TypeError("the codes of a frame depend on each other here; verify them in depth")
    return found
