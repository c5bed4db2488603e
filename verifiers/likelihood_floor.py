"""A token passes if the target finds it likely enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical


@dataclass(frozen=True)
class LikelihoodFloor:
    """Accept x where p(x) >= `floor` (CTC-SSD, Saon et al. 2026).

    p is the model's own distribution also under greedy decoding: the softmax of the scores behind
    the point mass. Corrections come from p, so that decoding resumes behind the tokens accepted; a
    token z comes out with q(z) [p(z) >= floor] + (1 - q(those likely enough)) p(z). Lossy; greedy
    decoding with a floor above 0.5 is exact, because what has more than half of the mass is the
    mode. 0 emits the draft, anything above 1 refuses it. Ids that are `unchecked` pass: the
    published code does not look at the end of a draft.

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
