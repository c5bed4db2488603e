"""A token passes if the target ranks it among its best few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical


@dataclass(frozen=True)
class RankLimit:
    """Accept x where it is among the `ranks` best of p, ties by id (UGSD, Xue et al. 2026).

    What the target rules out is never accepted. Corrections come from p: a token z comes out with
    q(z) [z is among the best] + (1 - q(best)) p(z). Lossy; greedy decoding with `ranks=1` is exact,
    as many as there are tokens emit the draft. Ranks are those of the scores, which greedy decoding
    keeps behind its point mass.

    Raises ValueError for fewer than one rank.
    """

    ranks: int = 3
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks}; 1 is the target's own choice, give that or more")

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        scores, own = p.scores, p.scores.gather(-1, x[..., None])
        earlier = torch.arange(p.size, device=x.device) < x[..., None]
        before = (scores > own) | ((scores == own) & earlier)  # counted: nothing is sorted
        return ((before.sum(-1) < self.ranks) & own.squeeze(-1).isfinite()).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p
