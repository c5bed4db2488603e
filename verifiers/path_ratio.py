"""Density ratio of whole denoising paths: exact speculation for tokens of a diffusion head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.distribution import Distribution
from mmspec.distributions.noise import Keys, Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.targets.continuous.paths import PathDistribution, PathResidual
from mmspec.verifiers.gaussian_steps import chain, fit
from mmspec.verifiers.walk import check


@dataclass(frozen=True)
class PathRatio(Verifier):
    """Rejection sampling of paths, cell by cell and step by step, lossless.

    With P and Q the densities of a drafted path x under target and draft, both at the states of x,

        accept with min(1, P(x) / Q(x)),   else draw from norm((P - Q)+) by thinning P:

    a maximal coupling of the two distributions of paths. (CSpD compares one Gaussian at the end of
    two different paths instead.) A step is kept if all its cells are; in the first one that is not,
    the cells refused are drawn anew, and steps behind it, which read them, are dropped. After full
    acceptance comes the target's own step, with the noise of its cells.

    What is decided about a cell depends on the noise of that cell alone, and a cell refused takes
    new noise, so what was dropped may use the noise of its cells again.

    Coupling every Gaussian step by itself would be exact, too, but one refusal in T steps refuses
    the path: with a mismatch r in each a path passes with about (1 - 0.4 r)^T, here with
    2 Phi(-r T^.5 / 2).

    Raises ValueError for trees, for drafts without a distribution, and for heads whose sampler adds
    no noise in some step: their paths have no density.
    """

    most_tries: int = 1 << 14
    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    random: ClassVar[bool] = True  # every step of a path must add noise
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False)
        p, position = path_distribution(scores.distribution), scores.position
        if not draft.nodes:
            none = torch.zeros(draft.batch, dtype=torch.int64, device=draft.tokens.device)
            return chain(draft, none, own(p[:, 0], position[:, 0], noise))
        q = path_distribution(draft.distribution)
        ratio = p[:, :-1].log_prob(draft.tokens) - q.log_prob(draft.tokens)  # (B, N, K)
        hits = noise.flip(ratio.clamp_max(0).exp(), Lane.ACCEPT)
        length = (hits.all(-1) & draft.mask).cumprod(-1).sum(-1)
        rows = torch.arange(draft.batch, device=length.device)
        whole = length == draft.mask.sum(-1)
        node = length.clamp_max(draft.nodes - 1)
        after = p[rows, length]
        after = replace(after, real=after.real & whole[:, None])
        refused = ~whole[:, None] & ~hits[rows, node]
        redrawn = self._redrawn(p[rows, node], q[rows, node], refused, noise)
        kept = torch.where(fit(refused, redrawn) > 0, redrawn, draft.tokens[rows, node])
        following = own(after, position[rows, length], noise)
        return chain(draft, length, torch.where(fit(whole, kept) > 0, following, kept))

    def _redrawn(
        self, p: PathDistribution, q: PathDistribution, refused: Tensor, noise: Noise
    ) -> Tensor:
        """Paths from the residual (B, K, S, *E) where `refused` (B, K), zeros elsewhere."""
        width = refused.shape[1]
        index = torch.arange(width, device=refused.device)
        keys = Keys(noise.fresh(Lane.RESIDUAL, index).key[refused])
        left = PathResidual(p[refused], q[refused], self.most_tries).sample(keys)
        paths = left.new_zeros(*refused.shape, *left.shape[1:])
        paths[refused] = left
        return paths


def own(p: PathDistribution, position: Tensor, noise: Noise) -> Tensor:  # (B, K) -> (B, K, S, *E)
    """The target's own paths, as plain sampling draws them."""
    return p.sample(Keys(noise.shared(position).key))


def path_distribution(distribution: Distribution | None) -> PathDistribution:
    """Narrow a distribution to one of paths."""
    if not isinstance(distribution, PathDistribution):
        raise TypeError(
            f"a distribution of paths is needed here, but the distribution is {type(distribution).__name__}"
        )
    return distribution
