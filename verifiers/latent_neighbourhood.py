"""LANTERN's acceptance: a token is backed by the target's mass on codes that look like it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.codes.codebook import Neighbours
from mmspec.distributions.categorical import Categorical
from mmspec.verifiers.lantern_residuals import Optimal, Pool, ResidualRule
from mmspec.verifiers.walk import at_token, ratio


class MassBound(Protocol):
    """How much mass may be pooled for a token of probability p(x)."""

    def __call__(self, own: Tensor) -> Tensor: ...  # (...) -> (...)


@dataclass(frozen=True)
class AdditiveBound:
    """At most `delta`, whatever the token (LANTERN). A token with p(x) = 0 can be accepted."""

    delta: float

    def __post_init__(self) -> None:
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta is {self.delta}, but a mass lies in [0, 1]; 0 is exact")

    def __call__(self, own: Tensor) -> Tensor:
        return torch.full_like(own, self.delta)


@dataclass(frozen=True)
class Multiplicative:
    """As much as makes p(x) `factor` times as large (LANTERN++, where it is called lambda).

    No token outside the target's support is accepted, and none more than `factor` times as often.
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

    The neighbours are pooled from the nearest on, at most k, as long as their mass stays within
    `bound`. Lossy; the bound limits how far p is moved for one token, not the distance of the
    output, which is the over-accepted mass, the sum of min((q - p)+, m), with the optimal
    `correction`. A bound of nothing is `Exact`, whatever q. With a point mass p and less than the
    whole mass allowed it is greedy matching; the released code relaxes greedy decoding by the soft
    p behind it.
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
        tokens, real = self.table.of(x, self.k + 1)
        mass = torch.where(real, p.gather(-1, tokens[..., : self.k]), 0).cumsum(-1)
        within = (mass <= self.bound(at_token(p, x))[..., None]) & real
        pooled = mass.masked_fill(~within, 0).amax(-1)  # mass grows along the run
        return Pool(tokens, real, within.sum(-1), pooled)
