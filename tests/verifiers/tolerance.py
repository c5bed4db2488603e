"""The rule of the style guide, which is in no list: tests over the lists must accept it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.distributions.categorical import Categorical


@dataclass(frozen=True)
class Tolerance:
    """Accept a bin within `bins` of the target's token (Spec-VLA, Wang et al. 2025).

    Ordered tokens only (action bins). Under greedy decoding `bins=0` is exact. Lossy otherwise.
    """

    bins: int
    lossless: ClassVar[bool] = False

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:
        return ((x - p.mode).abs() <= self.bins).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p
