"""SpecDec's rule: among the best tokens of the target, and not much less likely than its best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.errors import check_number
from mmspec.verifiers.distances import accepted_or


@dataclass(frozen=True)
class RankGap:
    """Accept x of rank at most beta with log max p - log p(x) <= tau (SpecDec, Xia et al. 2023).

    `ranks` is beta, `gap` is tau in nats. The correction is the target's best token, as in the
    paper, which decodes greedily: a token z has probability q(z) a(z) + (1 - sum q a) [z is the
    mode], a the acceptance. Ranks and gaps are those of the scores, ties by id, also for the point
    mass of greedy decoding. Lossy; `ranks=1` is greedy decoding. Every emitted token is within tau
    of the best in log-probability.

    Raises ValueError for fewer than one rank and for a negative gap.
    """

    ranks: int = 3
    gap: float = 1.0
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("ranks", self.ranks, 1, whole=True, example=3)
        if self.gap != math.inf:
            check_number("gap", self.gap, 0, example=1.0)

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        return self._table(p).gather(-1, x[..., None]).squeeze(-1)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return Categorical(p.source, hard=True)

    def bias(self, p: Categorical, q: Categorical) -> Tensor:  # (...)
        best = Categorical(p.scores, hard=True).probs
        return accepted_or(p.probs, q.probs, self._table(p), best)

    def _table(self, p: Categorical) -> Tensor:  # (..., V) acceptance of every token
        best = p.scores.sort(dim=-1, descending=True, stable=True)
        near = (best.values >= best.values[..., :1] - self.gap) & best.values.isfinite()
        near[..., self.ranks :] = False
        return near.to(p.probs).gather(-1, best.indices.argsort(-1))
