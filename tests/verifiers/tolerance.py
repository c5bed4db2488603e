"""The rule of the style guide, which no list holds: tests over the lists must take it as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.distributions.categorical import Categorical


@dataclass(frozen=True)
class Tolerance:
    """Accept a bin within `bins` of the target's choice (Spec-VLA, Wang et al. 2025).

    Ordered tokens only (action bins). Under greedy decoding `bins=0` is exact. Lossy otherwise.
    """

    bins: int
    lossless: ClassVar[bool] = False

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:
        return ((x - p.mode).abs() <= self.bins).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p
