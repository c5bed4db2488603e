"""Where a token stands in a picture decides what it may be: a law processor over places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mmspec.grid import Grid


@dataclass(frozen=True, eq=False)
class Raster:
    """Forces the structural tokens of a grid and leaves only codes in its cells.

    The answer depends on absolute positions alone, so it holds for every node of a window or tree
    at once, and for the laws p and q alike: a structural token has probability 1 in both, is
    drafted where it belongs and always accepted. Behind the picture only codes are left as well.
    Exact: it is part of the law, not of the verification.
    """

    grid: Grid
    start: Tensor  # (B, 1) int64: absolute position of each row's first picture token

    def __call__(self, scores: Tensor, position: Tensor) -> Tensor:  # (B, M, V), (B, M)
        forced, cells = _tables(self.grid, scores.shape[-1], scores.device)
        offset = (position - self.start).clamp(0, self.grid.length)
        only = forced[offset][..., None]  # (B, M, 1), -1 = a cell
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(~torch.where(only < 0, cells, tokens == only), -torch.inf)

    def forced(self, position: Tensor) -> Tensor:  # (B, M) -> (B, M), -1 = free
        """The structural tokens at some places."""
        table, _ = _tables(self.grid, 1, position.device)
        return table[(position - self.start).clamp(0, self.grid.length)]


@lru_cache(maxsize=16)
def _tables(grid: Grid, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Forced tokens by offset (L + 1,), and which of `size` tokens a cell may hold (size,)."""
    found = (grid.forced(offset) for offset in range(grid.length + 1))
    forced = torch.tensor([-1 if token is None else token for token in found], device=device)
    ids = grid.ids(device)
    cells = torch.zeros(size, dtype=torch.bool, device=device)
    cells[ids[ids < size]] = True
    return forced, cells
