"""MuLo-SD's acceptance: keep a code where the target likes its surroundings well enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.codes.codebook import Neighbours
from mmspec.distributions.categorical import Categorical


@dataclass(frozen=True)
class NeighbourhoodThreshold:
    """Accept when x and its k nearest codes hold at least `tau` of p (Peruzzo et al. 2026).

    A decision without chance, blind to q. What fails is drawn anew from p, as the paper does by
    letting the target resample. Lossy: tau=0 emits the draft unverified, tau > 1 is the target
    itself. The paper's tau and k are not public. Tokens that are no codes stand for themselves.
    """

    table: Neighbours
    k: int
    tau: float
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.table.check_count(self.k)
        if not self.tau >= 0:
            raise ValueError(f"tau is {self.tau}, but a mass is at least 0; 0 accepts everything")

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        self.table.check(p.size)
        tokens, real = self.table.of(x, self.k)
        around = (p.probs.gather(-1, tokens) * real).sum(-1)
        return (p.prob(x) + around >= self.tau).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p
