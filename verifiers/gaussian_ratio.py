"""Density-ratio coupling of Gaussian steps with different standard deviations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.gaussian import Gaussian, GaussianResidual
from mmspec.distributions.noise import Keys, Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.gaussian_steps import (
    accept_chain,
    pair_distributions,
    sample_target,
    verify_empty,
)


@dataclass(frozen=True)
class GaussianRatio(Verifier):
    """Rejection sampling of a chain of Gaussian steps with any standard deviations, lossless.

    For learned variances and for drafts with another noise schedule, where a reflection would be
    wrong. A state is accepted with min(1, p(x) / q(x)), full densities; the first rejected state is
    sampled again from norm((p - q)+) by thinning p: 1 / TV(p, q) trials on average, none of which
    calls the network. Densities are compared in float64. Where standard deviations agree,
    `Reflection` accepts as often and needs no trials.

    Raises ValueError for trees, for states without their `DrivingNoise`, for steps without noise,
    and after `max_trials` trials, which happens only for nearly equal distributions.
    """

    max_trials: int = 100_000
    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    decodes: ClassVar[tuple[str, ...]] = ("latents", "patches")
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.IID)

    def __post_init__(self) -> None:
        if self.max_trials < 1:
            raise ValueError(f"max_trials={self.max_trials} leaves no try; give at least 1")

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return verify_empty(draft, scores, noise)
        p, q, driving = pair_distributions(self, draft, scores)
        hits = noise.flip(density_ratio(p, q, driving, draft.mask), Lane.ACCEPT) & draft.mask
        length = hits.cumprod(-1).sum(-1)
        following = sample_target(scores, length, noise)
        refused = (length < draft.mask.sum(-1)).nonzero().squeeze(1)
        drawn = draw_residual(p, q, length, refused, noise, self.max_trials)
        return accept_chain(draft, length, following.index_copy(0, refused, drawn.to(following)))


def density_ratio(p: Gaussian, q: Gaussian, driving: Tensor, mask: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) (B, N) float64 of the states x sampled from q with noise `driving`."""
    p, q = _to_float64(p), _to_float64(q)
    if bool(((p.std <= 0) | (q.std <= 0)).flatten(2).any(-1).logical_and(mask).any()):
        raise ValueError(
            "a step with standard deviation 0 has no density; draft random steps only, or use "
            "a sampler that draws noise"
        )
    x = q.mean + q.std * driving
    return (p.log_prob(x) - q.log_prob(x)).clamp_max(0).exp()


def draw_residual(
    p: Gaussian, q: Gaussian, node: Tensor, rows: Tensor, noise: Noise, max_trials: int
) -> Tensor:  # distributions (B, N), (B,), (R,) -> (R, *E)
    """Sample norm((p - q)+) at the rejected `node` of some rows."""
    if not len(rows):
        return p.mean[rows, 0]
    at = node[rows]
    left = GaussianResidual(_to_float64(p)[rows, at], _to_float64(q)[rows, at], max_trials)
    fresh = noise.fresh_keys(Lane.RESIDUAL, torch.zeros(1, dtype=torch.int64, device=at.device))
    return left.sample(Keys(fresh.key[rows, 0]))


def _to_float64(distribution: Gaussian) -> Gaussian:
    return Gaussian(
        distribution.mean.double(),
        distribution.std.double().expand_as(distribution.mean),
        distribution.events,
    )
