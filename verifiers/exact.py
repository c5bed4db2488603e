"""Speculative sampling: the lossless rule with the highest acceptance of one proposal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.verifiers.walk import ratio


@dataclass(frozen=True)
class Exact:
    """Accept with min(1, p/q), else draw from norm((p - q)+) (Algorithm 1, Leviathan et al. 2023).

    Lossless; accepts with probability 1 - TV(p, q), the maximum of any lossless rule. A point mass
    p gives greedy matching; a point mass q accepts with p(x) and otherwise removes x from p (the
    delta rule).
    """

    lossless: ClassVar[bool] = True

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        return ratio(p.prob(x), q.prob(x))

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p.residual(q)
