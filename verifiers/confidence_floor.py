"""Accept tokens that the drafter predicted with high confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.distributions.categorical import Categorical


@dataclass(frozen=True)
class ConfidenceFloor:
    """Accept x where max q >= `floor`, regardless of p (Raj et al. 2024).

    q is the drafter's distribution also under greedy decoding: the softmax of the scores of the
    point mass. The first token below the floor is replaced by a sample of p, so a token z has
    distribution q(z) where max q reaches the floor and p(z) elsewhere. Lossy. 0 emits the draft,
    values above 1 reject it. Proposals without a distribution (`Kind.DET`) have confidence 1.

    Raises ValueError for a floor below 0.
    """

    floor: float = 0.9
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.floor >= 0:
            raise ValueError(f"floor is {self.floor}; a likelihood is at least 0, which keeps all")

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        sure = (q.scores.amax(-1) - q.scores.logsumexp(-1)).exp()
        return (sure >= self.floor).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p
