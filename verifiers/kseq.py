"""k-SEQ: all siblings are tested at once with one ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import as_categorical
from mmspec.draft import Draft, Kind
from mmspec.verifiers.branches import Branches, BranchVerifier, Step
from mmspec.verifiers.sample_and_match import match


@dataclass(frozen=True)
class KSeq(BranchVerifier):
    """Accept the first of k samples that passes min(1, p / (rho q)) (SpecTr, Sun et al. 2023).

    rho solves 1 - (1 - beta)^k = rho beta, beta = sum min(q, p / rho). Lossless; accepts at least 1
    - (1 - 1/k)^k of the optimum. One child is `Exact`. The children of a greedy drafter are not
    independent samples; they are matched against a sample of p.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def step(self, draft: Draft) -> Step:
        is_greedy = draft.distribution is None or as_categorical(draft.distribution).hard
        return match if is_greedy else _step


def _step(branches: Branches) -> tuple[Tensor, Tensor]:
    assert branches.q is not None
    p, q, x = branches.p, branches.q, branches.tokens
    real = branches.real_children()
    k = real.sum(-1, keepdim=True).to(p)
    rho = acceptance_ratio(p, q, k) if x.shape[-1] > 1 else torch.ones_like(k)
    tiny = torch.finfo(p.dtype).tiny
    ratio = p.gather(-1, x) / (rho * q.gather(-1, x)).clamp_min(tiny)
    survival = (1 - ratio.clamp_max(1) * real).cumprod(-1)
    taken = torch.minimum(q, p / rho)
    beta = taken.sum(-1, keepdim=True)
    factor = torch.where(beta > 0, (1 - (1 - beta).pow(k)) / beta.clamp_min(tiny), k)
    return survival, (p - taken * factor).clamp_min(0)


def acceptance_ratio(p: Tensor, q: Tensor, k: Tensor) -> Tensor:  # (..., V) x2, (..., 1)
    """rho in [1, k] by bisection, from the side where the residual stays non-negative.

    Any such rho is exact; one that is too large by 2^-16 of the interval rejects as much more.
    """
    low, width, steps = (
        torch.ones_like(k),
        k.clamp_min(1) - 1,
        52 if p.dtype == torch.float64 else 16,
    )
    for step in range(1, steps + 1):
        middle = torch.add(low, width, alpha=2.0**-step)
        beta = torch.minimum(q, p / middle).sum(-1, keepdim=True)
        below = torch.addcmul((1 - beta).pow_(k), middle, beta) < 1  # the root is above
        low = torch.where(below, middle, low)
    return torch.add(low, width, alpha=2.0**-steps)
