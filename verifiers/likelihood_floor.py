"""Accept tokens of sufficient target likelihood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.verifiers.distances import accepted_or


@dataclass(frozen=True)
class LikelihoodFloor:
    """Accept x where p(x) >= `floor` (CTC-SSD, Saon et al. 2026).

    p is the target's distribution also under greedy decoding: the softmax of the scores of the
    point mass. Corrections come from p, so decoding resumes after the accepted tokens; a token z
    has probability q(z) [p(z) >= floor] + (1 - q(tokens above the floor)) p(z). Lossy; greedy
    decoding with a floor above 0.5 is exact, because a token with more than half of the mass is the
    mode. 0 emits the draft, values above 1 reject it. The ids in `unchecked` always pass: the
    published code does not check the end of a draft.

    Raises ValueError for a floor below 0.
    """

    floor: float = 0.2
    unchecked: tuple[int, ...] = ()
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.floor >= 0:
            raise ValueError(f"floor is {self.floor}; a likelihood is at least 0, which keeps all")

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        own = p.scores.gather(-1, x[..., None]).squeeze(-1)
        likely = (own - p.scores.logsumexp(-1)).exp()
        spared = torch.tensor(self.unchecked, dtype=x.dtype, device=x.device)
        return ((likely >= self.floor) | torch.isin(x, spared)).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p

    def bias(self, p: Categorical, q: Categorical) -> Tensor:  # (...)
        passed = p.scores.softmax(-1) >= self.floor
        passed[..., list(self.unchecked)] = True
        return accepted_or(p.probs, q.probs, passed.to(p.probs), p.probs)
