"""Speculative sampling: the lossless rule with the highest acceptance for one proposal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.laws.categorical import residual
from mmspec.verifiers.walk import at_token


@dataclass(frozen=True)
class Exact:
    """Accept with min(1, p/q), else draw from norm((p - q)+) (Algorithm 1, Leviathan et al. 2023).

    Lossless; accepts with probability 1 - TV(p, q), the most any lossless rule can. A point mass p
    gives greedy matching; a point mass q accepts with p(x) and else removes x from p (the delta
    rule).
    """

    lossless: ClassVar[bool] = True

    def accept(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:  # (..., V) x2, (...) -> (...)
        return (at_token(p, x) / at_token(q, x).clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1)

    def residual(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:  # -> (..., V), sums to 1
        return residual(p, q)
