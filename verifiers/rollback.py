"""BiLD's rule: roll back to the first token that the large model finds improbable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.errors import check_number
from mmspec.verifiers.cascade import soften
from mmspec.verifiers.distances import accepted_or


@dataclass(frozen=True)
class Rollback:
    """Accept x with -log p(x) <= `limit`, and the target's best token always (BiLD).

    Kim et al. 2023 call the limit alpha_RB and run 2 to 5 nats, greedily. p is the distribution of
    sampling also under greedy decoding. Corrections come from p: a token z has probability q(z)
    a(z) + (1 - sum q a) p(z), a the acceptance. Lossy; greedy decoding with a limit below log 2 is
    exact, because a token with more than half of the mass is the mode.

    Raises ValueError for a limit below 0.
    """

    limit: float = 5.0
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.limit != math.inf:
            check_number("limit", self.limit, 0, example=5.0)

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        return self._table(p).gather(-1, x[..., None]).squeeze(-1)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p

    def bias(self, p: Categorical, q: Categorical) -> Tensor:  # (...)
        return accepted_or(p.probs, q.probs, self._table(p), p.probs)

    def _table(self, p: Categorical) -> Tensor:  # (..., V) acceptance of every token
        likely = soften(p) >= math.exp(-self.limit)
        best = torch.zeros_like(likely).scatter_(-1, p.mode[..., None], True)
        return (likely | best).to(p.probs)
