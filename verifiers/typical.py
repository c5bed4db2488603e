"""Typical acceptance: accept tokens that are not surprising for the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical


@dataclass(frozen=True)
class Typical:
    """Accept x when p(x) > min(epsilon, delta exp(-H(p))) (Medusa, Cai et al. 2024).

    Corrections come from p restricted to its typical tokens. Lossy; does not use q, so combine it
    with `Longest`, as Medusa does. Medusa runs epsilon=0.09, delta=0.3 (its helper functions swap
    the two; pass both). A point mass p is greedy matching.
    """

    epsilon: float
    delta: float
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.epsilon > 0 or not 0 < self.delta < 1:
            raise ValueError(
                f"epsilon is {self.epsilon} and delta is {self.delta}; "
                "epsilon must be positive and delta in (0, 1), so that some token is typical"
            )

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        return (p.prob(x) > self.threshold(p.probs)).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        probs = p.probs
        limit = self.threshold(probs)[..., None]
        typical = torch.where(probs > limit, probs, 0)  # includes the mode: e^-H <= max p
        return Categorical.from_probs(typical / typical.sum(-1, keepdim=True))

    def threshold(self, p: Tensor) -> Tensor:  # (..., V) -> (...)
        """The smallest accepted probability."""
        negative_entropy = torch.special.xlogy(p, p).sum(-1)
        return torch.exp(negative_entropy).mul(self.delta).clamp_max(self.epsilon)
