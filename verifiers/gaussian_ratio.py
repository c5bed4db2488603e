"""Density-ratio coupling: Gaussian steps whose standard deviations differ as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.gaussian import Gaussian, GaussianResidual
from mmspec.distributions.noise import Keys, Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.gaussian_steps import chain, own, pairs, plain


@dataclass(frozen=True)
class GaussianRatio(Verifier):
    """Rejection sampling of a chain of Gaussian steps with any standard deviations, lossless.

    For learned variances and for drafts with another noise schedule, where a reflection would be
    wrong. A state is accepted with min(1, p(x) / q(x)), full densities; the first one refused is
    drawn anew from norm((p - q)+) by thinning p: on average 1 / TV(p, q) tries, none of which calls
    the network. Densities are compared in float64. Where standard deviations agree `Reflection`
    accepts as often and needs no tries.

    Raises ValueError for trees, for states without their `Driving`, for steps without noise, and
    after `most_tries` tries: with nearly equal distributions, where a refusal is as rare as the
    tries are many.
    """

    most_tries: int = 100_000
    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.IID)

    def __post_init__(self) -> None:
        if self.most_tries < 1:
            raise ValueError(f"most_tries={self.most_tries} leaves no try; give at least 1")

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return plain(draft, scores, noise)
        p, q, driving = pairs(self, draft, scores)
        hits = noise.flip(density_ratio(p, q, driving, draft.mask), Lane.ACCEPT) & draft.mask
        length = hits.cumprod(-1).sum(-1)
        following = own(scores, length, noise)
        refused = (length < draft.mask.sum(-1)).nonzero().squeeze(1)
        drawn = redrawn(p, q, length, refused, noise, self.most_tries)
        return chain(draft, length, following.index_copy(0, refused, drawn.to(following)))


def density_ratio(p: Gaussian, q: Gaussian, driving: Tensor, mask: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) (B, N) float64 of the states x drawn from q with the noise `driving`."""
    p, q = _wide(p), _wide(q)
    if bool(((p.std <= 0) | (q.std <= 0)).flatten(2).any(-1).logical_and(mask).any()):
        raise ValueError(
            "a step with standard deviation 0 has no density; draft random steps only, or use "
            "a sampler that draws noise"
        )
    x = q.mean + q.std * driving
    return (p.log_prob(x) - q.log_prob(x)).clamp_max(0).exp()


def redrawn(
    p: Gaussian, q: Gaussian, node: Tensor, rows: Tensor, noise: Noise, most_tries: int
) -> Tensor:  # distributions (B, N), (B,), (R,) -> (R, *E)
    """Draws from norm((p - q)+) at the refused `node` of some rows."""
    if not len(rows):
        return p.mean[rows, 0]
    at = node[rows]
    left = GaussianResidual(_wide(p)[rows, at], _wide(q)[rows, at], most_tries)
    fresh = noise.fresh(Lane.RESIDUAL, torch.zeros(1, dtype=torch.int64, device=at.device))
    return left.sample(Keys(fresh.key[rows, 0]))


def _wide(distribution: Gaussian) -> Gaussian:
    return Gaussian(
        distribution.mean.double(),
        distribution.std.double().expand_as(distribution.mean),
        distribution.events,
    )
