"""Speculative sampling with an additive tolerance on the acceptance probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.verifiers.walk import ratio


@dataclass(frozen=True)
class AdditiveTolerance:
    """Accept with min(1, min(1, p/q) + beta) (SSD, Lin et al. 2025).

    Corrections come from norm((p - q)+), so the output differs from p by the sum of
    min(beta q, (q - p)+), at most min(beta, TV(p, q)) in total variation. The ids in `exempt` get
    no tolerance: end of sequence and other control codes, which would otherwise come early. Lossy,
    also for greedy decoding; `beta=0` is `Exact`, 1 emits the draft. Reconstructed: the correction
    and the exemption.

    Raises ValueError for a beta outside [0, 1].
    """

    beta: float = 0.1
    exempt: tuple[int, ...] = ()
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(
                f"beta is {self.beta}, but a tolerance lies between 0, which is exact, and 1, "
                "which emits the draft; give one, such as 0.1"
            )

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        control = torch.tensor(self.exempt, dtype=x.dtype, device=x.device)
        extra = self.beta * torch.isin(x, control, invert=True).to(p.probs)
        return (ratio(p.prob(x), q.prob(x)) + extra).clamp_max(1)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p.residual(q)
