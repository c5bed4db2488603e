"""Speculative sampling that tolerates a drafter surer than the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.laws.categorical import residual
from mmspec.verifiers.walk import at_token


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

    def accept(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:  # (..., V) x2, (...) -> (...)
        proposed = self.ell * at_token(q, x)
        return (at_token(p, x) / proposed.clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1)

    def residual(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:  # -> (..., V), sums to 1
        return residual(p, q)
