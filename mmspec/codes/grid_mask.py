"""Where a token stands in a picture decides what it may be: a distribution processor over places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mmspec.codes.grid import Grid


@dataclass(frozen=True, eq=False)
class GridMask:
    """Forces the structural tokens of a grid and leaves only codes in its cells.

    The answer depends on absolute positions alone, so it holds for every node of a window or tree
    at once, and for the distributions p and q alike: a structural token has probability 1 in both,
    is drafted where it belongs and always accepted. Behind the picture only codes are left as well.
    Exact: it is part of the distribution, not of the verification.
    """

    grid: Grid
    start: Tensor  # (B, 1) int64: absolute position of each row's first picture token

    def __call__(self, scores: Tensor, position: Tensor) -> Tensor:  # (B, M, V), (B, M)
        found = _closed(self.grid, scores.shape[-1], scores.device)
        if found is None:
            return scores
        sort, closed = found
        offset = (position - self.start).clamp(0, self.grid.length)
        return scores.masked_fill(closed[sort[offset]], -torch.inf)

    def forced(self, position: Tensor) -> Tensor:  # (B, M) -> (B, M), -1 = free
        """The structural tokens at some places."""
        table = _forced(self.grid, position.device)
        return table[(position - self.start).clamp(0, self.grid.length)]


@lru_cache(maxsize=16)
def _forced(grid: Grid, device: torch.device) -> Tensor:
    """Forced tokens by offset (L + 1,), -1 = a cell."""
    found = (grid.forced(offset) for offset in range(grid.length + 1))
    return torch.tensor([-1 if token is None else token for token in found], device=device)


@lru_cache(maxsize=16)
def _closed(grid: Grid, size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The sort of place at every offset (L + 1,), and what each of K sorts rules out (K, size).

    None where nothing is ruled out anywhere: cells alone, and every token a code.
    """
    tokens, sort = _forced(grid, device).unique(return_inverse=True)
    closed = torch.arange(size, device=device) != tokens[:, None]
    ids = grid.ids(device)
    cells = torch.ones(size, dtype=torch.bool, device=device)
    cells[ids[ids < size]] = False
    closed = torch.where(tokens[:, None] < 0, cells, closed)
    return (sort, closed) if bool(closed.any()) else None
