"""A token passes if whoever drafted it was sure of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.distributions.categorical import Categorical


@dataclass(frozen=True)
class ConfidenceFloor:
    """Accept x where max q >= `floor`, whatever the target says (Raj et al. 2024).

    q is the drafter's own distribution also under greedy decoding: the softmax of the scores behind
    the point mass. The target corrects the first token that was not sure enough, and says the next
    one; it is not asked about the others, so that the distribution of a token z is q(z) where q is
    sure and p(z) elsewhere. Lossy. 0 emits the draft, anything above 1 refuses it. Proposals
    without a distribution (`Kind.DET`) are sure by what they are, and pass any floor up to 1.

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
