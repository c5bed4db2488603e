"""Annealed relaxation: tolerate more at the beginning of a draft than at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Rule
from mmspec.errors import check_number
from mmspec.verifiers.exact import Exact


@dataclass(frozen=True)
class WeightedRule:
    """Accept with min(1, w a), a the acceptance of `inner`; w = 1 is `inner`."""

    inner: Rule
    weight: Tensor = field(repr=False)  # broadcasts against x
    lossless: ClassVar[bool] = False

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        return (self.weight.to(p.probs) * self.inner.accept(p, q, x)).clamp_max(1)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return self.inner.residual(p, q, x)


@dataclass(frozen=True)
class Annealed:
    """Accept with min(1, w_i p/q), w_i decreasing with the depth i (Cool-SD, Li et al. 2026).

    w_i = delta exp(-nu i - mu), at least 1. A token of depth i is tested only if all i before it
    were accepted, so the weight depends on the depth alone. `delta` is the mean weight over the
    draft (this determines mu, which is not public); the paper runs delta=1.1 and 2 with nu=0.7.
    Corrections are those of `inner`; norm((p - q)+) is optimal for any weights, and the
    over-accepted mass of a step is the sum of (q min(1, w p/q) - p)+. Lossy; delta=1 is `inner`.
    """

    delta: float
    nu: float = 0.7
    inner: Rule = field(default_factory=Exact)
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("delta", self.delta, 1, example=1.1)  # 1 is exact
        check_number("nu", self.nu, 0, example=0.7)

    def at(self, depth: Tensor | int, longest: int) -> Rule:
        """The rule for tokens of that depth (0 = first), in a draft of depth `longest`."""
        weights = self.weights(longest)
        if isinstance(depth, Tensor):
            weights = weights.to(depth.device)
        return WeightedRule(self.inner, weights[depth])

    def weights(self, longest: int) -> Tensor:  # (longest,) float64
        """w_0, w_1, ..., with mean delta: the first `above` decrease, the others are 1."""
        falling = torch.exp(-self.nu * torch.arange(longest, dtype=torch.float64))
        above = torch.arange(1, longest + 1)
        scale = (float(self.delta) * longest - (longest - above)) / falling.cumsum(0)
        above = (scale * falling >= 1).sum()  # the number of weights above 1
        return (scale[above - 1] * falling).clamp_min(1)
