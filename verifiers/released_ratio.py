"""The acceptance of continuous speculative decoding in its released code: lossy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.gaussian import DrivingNoise, Gaussian
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.gaussian_steps import expand_event
from mmspec.verifiers.path_ratio import as_path_distribution, sample_paths
from mmspec.verifiers.walk import check_draft

FACTORS = ("code", "path", "none")


@dataclass(frozen=True)
class ReleasedRatio(Verifier):
    """CSpD (Wang et al. 2024, arXiv 2411.11925), the rule of its public code.

    Target and draft follow *their own* paths under the same noise; with the Gaussians of the last
    step of each, mu and sigma per channel, a drafted token x is accepted with

        A = F prod(sigma_q / sigma_p) exp(-(|(x - mu_p) / sigma_p|^2 - |(x - mu_q) / sigma_q|^2)
            / (2 tau^2)),                          F = exp(sum of log sigma_p - log sigma_q)

    over the earlier steps. Otherwise y ~ N(mu_p, sigma_p^2) passes with (1 - q(y) / (F p(y)))+. The
    output distribution differs from the target's for these reasons:

    - the last step adds no noise, so x is mu_q and not a sample of the Gaussian compared;
    - the two paths differ, so neither Gaussian is the distribution of x given its path;
    - `tau` = 42 tempers the distance in the test, but not the normaliser or the residual;
    - F is inverted: aligned steps have densities in 1 / sigma, so paths would carry its inverse
      (`factor="path"`; "none" omits it);
    - cells are tested independently and sampled again in place, although later drafted cells depend
      on the old values; nothing is dropped;
    - the target does not read the draft: this is its distribution with fewer, wider steps;
    - after `tries` the zero vector is emitted; `fallback=True` emits the target's token instead.

    tau=1, factor="none" and a single noisy step give speculative sampling, which is exact. Raises
    ValueError for trees and for settings out of range.
    """

    tau: float = 42.0
    factor: str = "code"
    tries: int = 100
    fallback: bool = False
    lossless: ClassVar[bool] = False
    uses_trees: ClassVar[bool] = False
    is_blind: ClassVar[bool] = True  # the target does not read the draft
    decodes: ClassVar[tuple[str, ...]] = ("latents", "patches")
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise ValueError(f"tau={self.tau} must be positive; 42 is the published one")
        if self.factor not in FACTORS:
            raise ValueError(f"factor={self.factor!r} is none of {', '.join(FACTORS)}")
        if self.tries < 1:
            raise ValueError(f"tries={self.tries} leaves no try; give 1 or more")

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False)
        p = as_path_distribution(scores.distribution)
        none = torch.zeros(draft.batch, 0, dtype=torch.int64, device=draft.tokens.device)
        if not draft.nodes:
            return Verdict(none, none.sum(-1), sample_paths(p[:, 0], scores.position[:, 0], noise))
        assert isinstance(draft.extras, DrivingNoise)
        p, x = p[:, :-1], draft.tokens[..., -1, :]
        paths, theirs = p.walk(draft.extras.noise)
        mine, drafted = (
            _last(theirs),
            as_path_distribution(draft.distribution).step_distributions(draft.tokens),
        )
        ours, factor = _last(drafted), self._factor(theirs, drafted)
        away = (_squared_distance(mine, x) - _squared_distance(ours, x)) / self.tau**2
        ratio = factor + ours.std.log().sum(-1) - mine.std.log().sum(-1) - away / 2
        hits = noise.flip(ratio.clamp_max(0).exp(), Lane.ACCEPT) | ~p.real
        spare = paths[..., -1, :] if self.fallback else torch.zeros_like(x)
        redrawn = self._redraw(mine, ours, factor, ~hits, spare, noise)
        replaced = draft.tokens.clone()
        replaced[..., -1, :] = torch.where(expand_event(hits, x) > 0, x, redrawn)
        index = torch.arange(draft.nodes, device=x.device)
        path = torch.where(draft.mask, index, -1)
        return Verdict(path, draft.mask.sum(-1), None, replacements=replaced)

    def _factor(self, p: Gaussian, q: Gaussian) -> Tensor:  # (B, N, K) float64
        """ln F."""
        if self.factor == "none":
            return torch.zeros(p.mean.shape[:3], dtype=torch.float64, device=p.mean.device)
        spread = p.std.double().log() - q.std.double().log()
        total = spread[..., 1:-1, :].sum((-1, -2))
        return total if self.factor == "code" else -total

    def _redraw(
        self, p: Gaussian, q: Gaussian, factor: Tensor, open_: Tensor, spare: Tensor, noise: Noise
    ) -> Tensor:  # (B, N, K, C)
        """Thinned samples where `open_` (B, N, K), `spare` where none passed in time."""
        found, index = spare, torch.arange(open_[0].numel(), device=open_.device)
        keys = noise.fresh_keys(Lane.RESIDUAL, index)
        for trial in range(self.tries):
            if not bool(open_.any()):
                break
            normal = keys.split(2 * trial).normal(spare.shape[-1]).view_as(spare)
            y = p.mean + p.std * normal.double()
            ratio = (q.log_prob(y) - factor - p.log_prob(y)).clamp_max(0).exp()
            hit = open_ & ~(keys.split(2 * trial + 1).uniform().view_as(ratio) < ratio)  # or NaN
            found = torch.where(expand_event(hit, found) > 0, y.to(found.dtype), found)
            open_ = open_ & ~hit
        return found


def _last(distribution: Gaussian) -> Gaussian:  # events (S, C) -> (C)
    """The distribution of the last state."""
    return Gaussian(
        distribution.mean[..., -1, :].double(), distribution.std[..., -1, :].double(), 1
    )


def _squared_distance(distribution: Gaussian, x: Tensor) -> Tensor:
    """Squared distance in standard deviations."""
    return ((x - distribution.mean) / distribution.std).square().sum(-1)
