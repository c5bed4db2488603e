"""LANTERN: acceptance by the target's mass on similar image codes, and its corrections.

LANTERN (Jang et al. 2025) and LANTERN++ (Park et al. 2025) release several corrections, none of
them the one of least distance. `Optimal` is the default; `ClearedTarget` reproduces released code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.codes.codebook import Neighbours
from mmspec.distributions.categorical import Categorical, normalise
from mmspec.verifiers.walk import gather_token, ratio


@dataclass(frozen=True)
class Pool:
    """The neighbours of a tested token."""

    tokens: Tensor  # (..., k + 1) nearest first; (..., k) if the codebook has no more
    real: Tensor  # (..., 1) bool, False = the token is no image code and has no neighbours
    size: Tensor  # (...) how many of the first k were pooled
    mass: Tensor  # (...) their probability under p


class ResidualRule(Protocol):
    """The distribution of the next token, or of the test of the next sibling.

    `pool` returns the neighbours of x.
    """

    def __call__(
        self, p: Categorical, q: Categorical, x: Tensor, pool: Callable[[], Pool]
    ) -> Categorical: ...  # distributions (...) x2, (...) -> distribution (...)


@dataclass(frozen=True)
class Optimal:
    """norm((p - q)+): the least distance for any relaxed acceptance (Cool-SD, Li et al. 2026)."""

    def __call__(
        self, p: Categorical, q: Categorical, x: Tensor, pool: Callable[[], Pool]
    ) -> Categorical:
        return p.residual(q)


@dataclass(frozen=True)
class ClearedTarget:
    """norm((p' - q)+), p' without the neighbours of x.

    As released for dynamic trees of LlamaGen and Anole, where q is a point mass, and for every tree
    of Lumina-mGPT. All k neighbours and one more are removed whenever one could be pooled. Falls
    back to p where no mass is left; the released code falls back to a uniform distribution over the
    vocabulary.
    """

    def __call__(
        self, p: Categorical, q: Categorical, x: Tensor, pool: Callable[[], Pool]
    ) -> Categorical:
        left = (_clear_neighbours(p.probs, pool()) - q.probs).clamp_min(0)
        return Categorical.from_probs(normalise(left, p.probs))


def _clear_neighbours(distribution: Tensor, pool: Pool) -> Tensor:  # (..., V) -> (..., V)
    """`distribution` without the neighbours, where at least one was pooled."""
    is_removed = (pool.real & (pool.size > 0)[..., None]).expand_as(pool.tokens)
    remaining = torch.where(is_removed, 0, distribution.gather(-1, pool.tokens))
    return distribution.scatter(-1, pool.tokens, remaining)


class MassBound(Protocol):
    """The mass that may be pooled for a token of probability p(x)."""

    def __call__(self, own: Tensor) -> Tensor: ...  # (...) -> (...)


@dataclass(frozen=True)
class AdditiveBound:
    """At most `delta` for any token (LANTERN). A token with p(x) = 0 can be accepted."""

    delta: float

    def __post_init__(self) -> None:
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta is {self.delta}, but a mass lies in [0, 1]; 0 is exact")

    def __call__(self, own: Tensor) -> Tensor:
        return torch.full_like(own, self.delta)


@dataclass(frozen=True)
class Multiplicative:
    """The mass that makes p(x) `factor` times as large (LANTERN++, called lambda there).

    No token with p(x) = 0 is accepted, and none more than `factor` times as often.
    """

    factor: float

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(f"factor is {self.factor}, but must be at least 1; 1 is exact")

    def __call__(self, own: Tensor) -> Tensor:
        return (self.factor - 1) * own


@dataclass(frozen=True)
class LatentNeighbourhood:
    """Accept with min(1, (p(x) + m) / q(x)), m the mass of x's nearest codes (Jang et al. 2025).

    Up to k neighbours are pooled, nearest first, while their mass stays within `bound`. Lossy; the
    bound limits the change of p for one token, not the distance of the output. With the optimal
    `correction` that is the over-accepted mass, the sum of min((q - p)+, m). A bound of 0 is
    `Exact` for any q. With a point mass p and a bound below 1 it is greedy matching; the released
    code relaxes greedy decoding by the soft p of the same scores.
    """

    table: Neighbours
    k: int
    bound: MassBound
    correction: ResidualRule = field(default_factory=Optimal)
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.table.check_count(self.k)

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        return ratio(p.prob(x) + self.pool(p.probs, x).mass, q.prob(x))

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return self.correction(p, q, x, lambda: self.pool(p.probs, x))

    def pool(self, p: Tensor, x: Tensor) -> Pool:  # (..., V), (...)
        """The longest run of nearest neighbours whose mass is within the bound."""
        self.table.check(p.shape[-1])
        tokens, real = self.table.lookup(x, self.k + 1)
        mass = torch.where(real, p.gather(-1, tokens[..., : self.k]), 0).cumsum(-1)
        within = (mass <= self.bound(gather_token(p, x))[..., None]) & real
        pooled = mass.masked_fill(~within, 0).amax(-1)  # mass grows along the run
        return Pool(tokens, real, within.sum(-1), pooled)
