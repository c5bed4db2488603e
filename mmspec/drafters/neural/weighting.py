"""Weights of the members of an ensemble: fixed, or adapted while decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.errors import check_number


class Weighting(Protocol):
    """Weights per batch row."""

    learns: ClassVar[bool]  # whether it needs evidence

    def begin(self, batch: int, members: int, device: torch.device) -> Any: ...
    def weights(self, state: Any) -> Tensor: ...  # (B, M), rows sum to 1
    def observe(self, state: Any, evidence: Sequence[Evidence]) -> Any: ...


@dataclass(frozen=True)
class Evidence:
    """The distributions of one row in a round, at T verified positions."""

    members: Tensor  # (T, M, V) distribution of each member
    target: Tensor  # (T, V) distribution of the target


@dataclass(frozen=True)
class FixedWeights:
    """Constant weights; by default uniform (IbED)."""

    values: tuple[float, ...] | None = None
    learns: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.values is None:
            return
        for one in self.values:
            check_number("weights", one, 0, example=0.5)
        if sum(self.values) <= 0:
            raise ValueError(f"weights={self.values} are all 0; give one above 0")

    def begin(self, batch: int, members: int, device: torch.device) -> Tensor:
        values = (1.0,) * members if self.values is None else self.values
        if len(values) != members:
            raise ValueError(f"{len(values)} weights were given for {members} members")
        weights = torch.tensor(values, device=device)
        return (weights / weights.sum()).expand(batch, -1)

    def weights(self, state: Tensor) -> Tensor:
        return state

    def observe(self, state: Tensor, evidence: Sequence[Evidence]) -> Tensor:
        return state


@dataclass(frozen=True)
class Agreement:
    """TABED's weights: the grid point that would have agreed most often with the target's choice.

    Counts argmax(sum w_m q_m) == argmax p over the verified positions, or over the last `window` of
    them; ties go to the smallest sum of KL(p || q_w), then to the earlier point. Every row uses its
    own history, so that its draft does not depend on its batch. Uniform until there is evidence.
    """

    steps: int = 10  # 1 / step of the grid
    window: int = 0  # 0 = the whole history
    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.steps < 1 or self.window < 0:
            raise ValueError(
                f"steps={self.steps}, window={self.window}: give at least 1 step and a window from "
                "0 up"
            )

    def begin(self, batch: int, members: int, device: torch.device) -> _GridHistory:
        grid = simplex(members, self.steps).to(device)
        return _GridHistory(grid, [torch.zeros(0, 2, len(grid), device=device)] * batch)

    def weights(self, state: _GridHistory) -> Tensor:
        return torch.stack([_best_weights(state.grid, past) for past in state.past])

    def observe(self, state: _GridHistory, evidence: Sequence[Evidence]) -> _GridHistory:
        past = []
        for old, new in zip(state.past, evidence, strict=True):
            rows = torch.cat((old, _score_grid(state.grid, new)))
            if self.window == 0:  # only the sum matters
                rows = rows.sum(0, keepdim=True)[: len(rows)]
            past.append(rows[-self.window :] if self.window else rows)
        return _GridHistory(state.grid, past)


@dataclass(frozen=True)
class _GridHistory:
    """Agreement of every grid point with the target."""

    grid: Tensor  # (G, M)
    past: list[Tensor]  # per row (T, 2, G): agreements and divergences of every grid point


def simplex(members: int, steps: int) -> Tensor:  # (G, M), G = C(steps + M - 1, M - 1)
    """All multiples of 1 / steps: 11, 66, 286 points for 2, 3, 4 members and 10 steps."""
    return torch.tensor(_simplex(members, steps), dtype=torch.float32) / steps


@lru_cache(maxsize=16)
def _simplex(members: int, steps: int) -> list[list[int]]:
    points = []
    for bars in combinations(range(steps + members - 1), members - 1):
        edges = [-1, *bars, steps + members - 1]
        points.append([right - left - 1 for left, right in pairwise(edges)])
    return points


def _score_grid(grid: Tensor, evidence: Evidence) -> Tensor:  # (T, 2, G)
    rows = []
    # one by one, because V is large
    for members, target in zip(evidence.members, evidence.target, strict=True):
        mixed = grid @ members.float()  # (G, V)
        agrees = (mixed.argmax(-1) == target.argmax()).float()
        log_mixed = mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()
        entropy = torch.special.entr(target.float()).sum()
        rows.append(torch.stack((agrees, -log_mixed @ target.float() - entropy)))
    return torch.stack(rows) if rows else grid.new_zeros(0, 2, len(grid))


def _best_weights(grid: Tensor, past: Tensor) -> Tensor:  # (M,)
    if not len(past):
        return grid.new_full(grid.shape[1:], 1 / grid.shape[1])
    agrees, divergence = past.sum(0)
    divergence = divergence.masked_fill(agrees < agrees.max(), torch.inf)
    return grid[divergence.argmin()]
