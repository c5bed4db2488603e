"""Density ratio of whole denoising paths: exact verification of tokens from a diffusion head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions import Distribution
from mmspec.distributions.noise import Keys, Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.targets.continuous.paths import PathDistribution, PathResidual
from mmspec.verifiers.gaussian_steps import accept_chain, expand_event
from mmspec.verifiers.walk import check_draft


@dataclass(frozen=True)
class PathRatio(Verifier):
    """Rejection sampling of paths, cell by cell and step by step, lossless.

    With P and Q the densities of a drafted path x under target and draft, both at the states of x,

        accept with min(1, P(x) / Q(x)),   else sample from norm((P - Q)+) by thinning P:

    a maximal coupling of the two distributions of paths. (CSpD compares one Gaussian at the end of
    two different paths instead.) A step is accepted if all its cells are. In the first rejected
    step the rejected cells are sampled again, and later steps, which depend on them, are dropped.
    After full acceptance comes the target's step, sampled with the noise of its cells.

    The decision on a cell depends on the noise of that cell alone, and a rejected cell takes new
    noise, so dropped cells may use their noise again.

    Coupling every Gaussian step separately would also be exact, but one rejection in T steps
    rejects the path: with a mismatch r in each step a path passes with about (1 - 0.4 r)^T, here
    with 2 Phi(-r T^.5 / 2).

    Raises ValueError for trees, for drafts without a distribution, and for heads whose sampler adds
    no noise in some step: their paths have no density.
    """

    max_trials: int = 1 << 14
    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    needs_random_steps: ClassVar[bool] = True  # every step of a path must add noise
    decodes: ClassVar[tuple[str, ...]] = ("latents", "patches")
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False)
        p, position = as_path_distribution(scores.distribution), scores.position
        if not draft.nodes:
            none = torch.zeros(draft.batch, dtype=torch.int64, device=draft.tokens.device)
            return accept_chain(draft, none, sample_paths(p[:, 0], position[:, 0], noise))
        q = as_path_distribution(draft.distribution)
        target = p[:, :-1].log_prob(draft.tokens)  # (B, N, K)
        ratio = target - q.log_prob(draft.tokens)
        hits = noise.flip(ratio.clamp_max(0).exp(), Lane.ACCEPT)
        length = (hits.all(-1) & draft.mask).cumprod(-1).sum(-1)
        rows = torch.arange(draft.batch, device=length.device)
        whole = length == draft.mask.sum(-1)
        node = length.clamp_max(draft.nodes - 1)
        after = p[rows, length]
        after = replace(after, real=after.real & whole[:, None])
        refused = ~whole[:, None] & ~hits[rows, node]
        redrawn = self._draw_residual(p[rows, node], q[rows, node], refused, noise)
        kept = torch.where(expand_event(refused, redrawn) > 0, redrawn, draft.tokens[rows, node])
        following = sample_paths(after, position[rows, length], noise)
        following = torch.where(expand_event(whole, kept) > 0, following, kept)
        broken = ~target.isfinite().flatten(1).all(-1)  # of the target; the loop reports NaN
        return accept_chain(
            draft, length, following.masked_fill(expand_event(broken, following) > 0, torch.nan)
        )

    def _draw_residual(
        self, p: PathDistribution, q: PathDistribution, refused: Tensor, noise: Noise
    ) -> Tensor:
        """Paths from the residual (B, K, S, *E) where `refused` (B, K), zeros elsewhere."""
        width = refused.shape[1]
        index = torch.arange(width, device=refused.device)
        keys = Keys(noise.fresh_keys(Lane.RESIDUAL, index).key[refused])
        left = PathResidual(p[refused], q[refused], self.max_trials).sample(keys)
        paths = left.new_zeros(*refused.shape, *left.shape[1:])
        paths[refused] = left
        return paths


def sample_paths(
    p: PathDistribution, position: Tensor, noise: Noise
) -> Tensor:  # (B, K) -> (B, K, S, *E)
    """The target's paths, as plain sampling generates them."""
    return p.sample(Keys(noise.shared_keys(position).key))


def as_path_distribution(distribution: Distribution | None) -> PathDistribution:
    """Narrow a distribution to one of paths. Raises TypeError for others."""
    if not isinstance(distribution, PathDistribution):
        raise TypeError(f"a PathDistribution is needed, but it is a {type(distribution).__name__}")
    return distribution
