"""Accept tokens of high rank under the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical


@dataclass(frozen=True)
class RankLimit:
    """Accept x among the `ranks` best tokens of p, ties by id (UGSD, Xue et al. 2026).

    A token with p(x) = 0 is never accepted. Corrections come from p: a token z has probability q(z)
    [z is among the best] + (1 - q(best)) p(z). Lossy; greedy decoding with `ranks=1` is exact,
    `ranks` of the vocabulary size emits the draft. Ranks are those of the scores, also for the
    point mass of greedy decoding.

    Raises ValueError for fewer than one rank.
    """

    ranks: int = 3
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks}; give at least 1, the best token of the target")

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        scores, own = p.scores, p.scores.gather(-1, x[..., None])
        earlier = torch.arange(p.size, device=x.device) < x[..., None]
        before = (scores > own) | ((scores == own) & earlier)  # counted, without sorting
        return ((before.sum(-1) < self.ranks) & own.squeeze(-1).isfinite()).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p
