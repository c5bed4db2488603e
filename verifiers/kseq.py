"""k-SEQ: all siblings are tested at once with one ratio."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
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
    """rho in [1, k], from the side where the residual stays non-negative, which is exact.

    Each step evaluates `_POINTS` points of the interval at once and keeps the part with the root.
    """
    p, q, k = p[..., None, :], q[..., None, :], k[..., None]
    high = k.clamp_min(1).expand(*p.shape[:-1], 1)
    low, share = torch.ones_like(high), _shares(k.dtype, k.device)
    for _ in range(18 if p.dtype == torch.float64 else 5):
        points = torch.lerp(low, high, share)  # (..., P + 2, 1), the ends of all parts
        beta = torch.minimum(q, p / points).sum(-1, keepdim=True)
        below = 1 - (1 - beta).pow(k) > points * beta  # the root is above the point
        part = below[..., 1:-1, :].sum(-2, keepdim=True)
        low, high = points.gather(-2, part), points.gather(-2, part + 1)
    return high[..., 0]


_POINTS = 7


@lru_cache(maxsize=8)
def _shares(dtype: torch.dtype, device: torch.device) -> Tensor:  # (P + 2, 1)
    return torch.linspace(0, 1, _POINTS + 2, dtype=dtype, device=device)[:, None]
