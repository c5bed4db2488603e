"""MuLo-SD: accept a code whose neighbourhood has enough target mass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.codes.codebook import Neighbours
from mmspec.distributions.categorical import Categorical


@dataclass(frozen=True)
class NeighbourhoodThreshold:
    """Accept when x and its k nearest codes hold at least `tau` of p (Peruzzo et al. 2026).

    A deterministic decision that does not use q. Rejected tokens are sampled again from p, as in
    the paper. Lossy: tau=0 emits the draft, tau > 1 samples the target. The paper's tau and k are
    not public. Tokens that are no codes have no neighbours.
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
        tokens, real = self.table.lookup(x, self.k)
        around = (p.probs.gather(-1, tokens) * real).sum(-1)
        return (p.prob(x) + around >= self.tau).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p
