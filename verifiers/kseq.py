"""k-SEQ: all siblings are tested at once with one ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.distributions.categorical import as_categorical
from mmspec.draft import Draft, Kind
from mmspec.verifiers.branches import Branches, BranchVerifier, Step
from mmspec.verifiers.sample_and_match import match

FEWEST, MOST = 1 << 12, 1 << 16  # bins of the ratio p / q, as many as tokens in between
FEWEST_REFINED = 1 << 6  # in float64, where they are divided again


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
    """Where nothing can be taken (beta = 0) all weights are 0, which stands for p."""
    assert branches.q is not None
    p, q, x = branches.p, branches.q, branches.tokens
    real = branches.real_children() if branches.has_gaps else None
    k = _column(branches.sizes, x.device) if real is None else real.sum(-1, keepdim=True)
    taken = torch.minimum(q, _divide_by_ratio(branches, k))
    chance = taken.gather(-1, x) / q.gather(-1, x).clamp_min_(torch.finfo(p.dtype).tiny)
    chance = chance if real is None else chance * real
    beta = taken.sum(-1, keepdim=True)
    accepted = 1 - (1 - beta).pow_(k)  # by any of the k tests
    rest = p.mul_(beta).addcmul_(taken, accepted, value=-1).clamp_min_(0)
    return (1 - chance).cumprod(-1), rest


def _divide_by_ratio(branches: Branches, k: Tensor) -> Tensor:  # (B, M, V)
    """p / rho; rho is 1 for branches that cannot have several children."""
    p, q, most = branches.p, branches.q, len(branches.counts)
    assert q is not None
    if most == 1:
        return p
    several = branches.counts[1]
    if several == p.shape[1]:
        return p / acceptance_ratio(p, q, k, most)
    few = k[:, :several] if branches.has_gaps else _column(branches.sizes[:several], p.device)
    rho = acceptance_ratio(p[:, :several], q[:, :several], few, most)
    return p / functional.pad(rho, (0, 0, 0, p.shape[1] - several), value=1.0)


@lru_cache(maxsize=64)
def _column(values: tuple[int, ...], device: torch.device) -> Tensor:  # (M, 1)
    return torch.tensor(values, device=device)[:, None]


def acceptance_ratio(p: Tensor, q: Tensor, k: Tensor, most: int) -> Tensor:
    """rho in [1, k], from the side where the residual stays non-negative: (..., V) x2, (..., 1).

    `most` is at least any k. One sum over p / q in equal bins of [1, most] gives sum (p - rho q)+ =
    1 - rho beta at every edge; rho is the first edge above the root. Any such rho is exact; one
    that is too large by a bin rejects as much more. A bin is 2^-12 of the interval, or one V-th
    down to 2^-16 where vocabularies are larger; in float64, the bin of the root is divided again
    until it is 2^-48.
    """
    is_refined = p.dtype == torch.float64
    bins = min(max(p.shape[-1], FEWEST_REFINED if is_refined else FEWEST), MOST)
    grid = _first_grid(most, bins, p.dtype, p.device)
    rho = _find_edge(p, q, k, grid)
    for _ in range(math.ceil(48 / math.log2(bins)) - 1 if is_refined else 0):
        grid = _make_grid(rho, grid.spacing / bins, bins)
        rho = _find_edge(p, q, k, grid).clamp_min_(1)
    return rho


def _find_edge(p: Tensor, q: Tensor, k: Tensor, grid: _Grid) -> Tensor:
    """The lowest edge of the grid that is not below the root (..., 1)."""
    last = grid.edges.shape[-1] - 1
    place = torch.addcdiv(grid.origin, p, q, value=-1 / grid.spacing).long()
    place = place.clamp_(0, last)  # p / 0 is above all edges; 0 / 0 has no mass in any bin
    empty = grid.empty.expand(*p.shape[:-1], -1)
    p, q = (empty.scatter_add(-1, place, one).cumsum(-1) for one in (p, q))  # where p >= edge q
    excess = torch.addcmul(p, grid.edges, q, value=-1)  # sum (p - rho q)+
    missed = torch.addcdiv(grid.losses, excess, grid.edges)  # 1 - beta
    below = (missed.pow(k) < excess).sum(-1, keepdim=True)
    return torch.add(grid.low, below, alpha=grid.spacing)


@dataclass(frozen=True)
class _Grid:
    """Ratios in descending order; after the lowest, one that is never below a root."""

    edges: Tensor  # (..., bins + 2)
    empty: Tensor  # 0
    losses: Tensor  # 1 - 1 / edge
    origin: Tensor  # (..., 1) a ratio r is in bin floor(origin - r / spacing)
    low: Tensor  # (..., 1) the lowest edge
    spacing: float


def _make_grid(high: Tensor, spacing: float, bins: int) -> _Grid:  # (..., 1)
    steps = torch.arange(bins + 2, dtype=high.dtype, device=high.device)
    steps[-1] = -1e30
    edges = high - spacing * steps
    low = high - spacing * bins
    return _Grid(edges, torch.zeros_like(edges), 1 - 1 / edges, high / spacing + 1, low, spacing)


@lru_cache(maxsize=16)
def _first_grid(most: int, bins: int, dtype: torch.dtype, device: torch.device) -> _Grid:
    high = torch.full((1,), float(most), dtype=dtype, device=device)
    return _make_grid(high, (most - 1) / bins, bins)
