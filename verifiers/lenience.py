"""Speculative sampling with lenience."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.verifiers.walk import ratio


@dataclass(frozen=True)
class Lenience:
    """Accept with min(1, p / (ell q)), ell in (0, 1] (appendix A.5, Leviathan et al. 2023).

    Lossy: a token comes out with at most p(x) / ell. `ell=1` is `Exact`.
    """

    ell: float
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.ell <= 1:
            raise ValueError(f"ell is {self.ell}, but lenience lies in (0, 1]; 1 is the exact rule")

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        return ratio(p.prob(x), self.ell * q.prob(x))

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p.residual(q)
