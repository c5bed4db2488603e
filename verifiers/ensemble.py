"""Emit a mixture of the target's and the drafter's distribution."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.distributions.categorical import Categorical
from mmspec.errors import check_number
from mmspec.verifiers.surrogate import Surrogate


@dataclass(frozen=True)
class WeightedEnsemble(Surrogate):
    """Accept with 1 - w + w min(1, p/q): the output is v = w p + (1 - w) q (DIVERSE).

    `weight` is w, the share of the target. Accepts with probability 1 - w TV(p, q) and differs from
    p by (1 - w) TV(p, q). Lossy, also for greedy decoding; 1 is `Exact`, 0 emits the draft.

    Raises ValueError for a weight outside [0, 1].
    """

    weight: float = 0.5

    def __post_init__(self) -> None:
        check_number("weight", self.weight, 0, 1, example=0.5)

    def mix(self, p: Categorical, q: Categorical) -> Categorical:
        return Categorical.from_probs(self.weight * p.probs + (1 - self.weight) * q.probs)
