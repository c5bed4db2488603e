"""Speculative cascades: the target decides only where a deferral rule asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.errors import check_number
from mmspec.verifiers.distances import total_variation
from mmspec.verifiers.surrogate import Surrogate


class Deferral(Protocol):
    """Whether the target's distribution is used in place of the drafter's, per position."""

    def defers(self, p: Tensor, q: Tensor) -> Tensor: ...  # (..., V) x2 -> (...) bool


@dataclass(frozen=True)
class Chow:
    """Defer where the drafter is unsure: max q < 1 - alpha. Does not read p."""

    alpha: float = 0.3

    def defers(self, p: Tensor, q: Tensor) -> Tensor:
        return q.amax(-1) < 1 - self.alpha


@dataclass(frozen=True)
class Difference:
    """Defer where the target is surer by more than alpha: max q < max p - alpha."""

    alpha: float = 0.3

    def defers(self, p: Tensor, q: Tensor) -> Tensor:
        return q.amax(-1) < p.amax(-1) - self.alpha


@dataclass(frozen=True)
class OptimalDeferral:
    """The plug-in of the optimal rule: max q < max p - alpha TV(p, q), alpha the price of TV."""

    alpha: float = 0.3

    def defers(self, p: Tensor, q: Tensor) -> Tensor:
        return q.amax(-1) < p.amax(-1) - self.alpha * total_variation(p, q)


@dataclass(frozen=True)
class Cascade(Surrogate):
    """Emit p where `deferral` defers and q elsewhere (Narasimhan et al. 2024, table 1).

    Exactly v = d p + (1 - d) q, d in {0, 1} per position: TV(p, q) away from p where d = 0. The
    rule compares the distributions of sampling also under greedy decoding: the softmax of the
    scores of point masses. Lossy. Proposals without a distribution are sure, max q = 1.
    """

    deferral: Deferral = field(default_factory=OptimalDeferral)

    def mix(self, p: Categorical, q: Categorical) -> Categorical:
        return Categorical.where(self.deferral.defers(soften(p), soften(q)), p, q)


@dataclass(frozen=True)
class TokenCascade(Surrogate):
    """Keep the drafter's tokens that are nearly the target's best (ibid., token-specific rule).

    v(x) = q(x) [x in T] + p(x) q(not T), T = {x: p(x) >= (1 - alpha) max p}. Lossy; alpha = 0 under
    greedy decoding is exact, since T is then the target's token.
    """

    alpha: float = 0.3

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, 0, 1, example=0.3)

    def mix(self, p: Categorical, q: Categorical) -> Categorical:
        soft = soften(p)
        near = soft >= (1 - self.alpha) * soft.amax(-1, keepdim=True)
        kept = torch.where(near, q.probs, 0)
        return Categorical.from_probs(kept + p.probs * (1 - kept.sum(-1, keepdim=True)))


def soften(distribution: Categorical) -> Tensor:  # (..., V)
    """Probabilities of sampling, also of the point mass of greedy decoding."""
    return distribution.scores.softmax(-1) if distribution.hard else distribution.probs


DEFERRALS: Mapping[str, type[Chow] | type[Difference] | type[OptimalDeferral]] = {
    "chow": Chow,
    "difference": Difference,
    "optimal": OptimalDeferral,
}
