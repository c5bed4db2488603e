"""The token layout of a generated image: a header, rows of codes in raster order, a footer.

Offsets count new tokens from 0, the first one after the prompt:

    Grid(2, 3, separator=9, header=(7,), footer=(8,))

    offset   0   1  2  3  4   5  6  7  8   9
    token    7   c  c  c  9   c  c  c  9   8      c = some code, the others are forced
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Grid:
    """The layout of `height` x `width` codes after a prompt.

    `separator` ends every row, including the last. `codes` are the ids that a cell may hold: first
    and stop of a range, or a tensor (C,) int64 of ids.
    """

    height: int
    width: int
    codes: tuple[int, int] | Tensor
    separator: int | None = None
    header: tuple[int, ...] = ()  # forced tokens before the first row
    footer: tuple[int, ...] = ()  # forced tokens after the last row

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(
                f"a grid of {self.height} x {self.width} has no cells; give 1 x 1 or more"
            )
        if not isinstance(self.codes, Tensor) and not 0 <= self.codes[0] < self.codes[1]:
            raise ValueError(
                f"codes={self.codes} is not a range of ids; give (first, stop) with "
                "0 <= first < stop"
            )
        if isinstance(self.codes, Tensor) and (self.codes.dim() != 1 or not len(self.codes)):
            raise ValueError(
                f"codes has shape {tuple(self.codes.shape)}; give a tensor of ids with one axis"
            )

    @property
    def period(self) -> int:
        """Tokens per row, its separator included."""
        return self.width + (self.separator is not None)

    @property
    def length(self) -> int:
        """Tokens of the whole image."""
        return len(self.header) + self.height * self.period + len(self.footer)

    @property
    def cells(self) -> int:
        return self.height * self.width

    def ids(self, device: torch.device | None = None) -> Tensor:  # (C,) int64
        """The ids that a cell may hold."""
        if isinstance(self.codes, Tensor):
            return self.codes.to(device)
        return torch.arange(*self.codes, device=device)

    def cell_at(self, offset: int) -> tuple[int, int] | None:
        """Row and column of the code at an offset; None if the token is no code."""
        row, column = divmod(offset - len(self.header), self.period)
        return (row, column) if 0 <= row < self.height and column < self.width else None

    def offset_of(self, row: int, column: int) -> int:
        """The offset of a cell. Raises ValueError for a cell outside the grid."""
        if not (0 <= row < self.height and 0 <= column < self.width):
            raise ValueError(
                f"({row}, {column}) lies outside a grid of {self.height} x {self.width}; rows and "
                "columns count from 0"
            )
        return len(self.header) + row * self.period + column

    def forced_token(self, offset: int) -> int | None:
        """The forced token at an offset; None for a cell, and outside the image."""
        if 0 <= offset < len(self.header):
            return self.header[offset]
        index = offset - (self.length - len(self.footer))
        if 0 <= index < len(self.footer):
            return self.footer[index]
        inside = 0 <= offset < self.length
        return self.separator if inside and self.cell_at(offset) is None else None


@dataclass(frozen=True, eq=False)
class GridMask:
    """Forces the structural tokens of a grid and allows only codes in its cells.

    A `PositionProcessor`: the result depends on absolute positions alone, so it applies to every
    node of a window or tree at once, and to p and q alike. A structural token has probability 1 in
    both and is always accepted. After the image only codes are allowed as well. Exact: it is part
    of the distribution.
    """

    grid: Grid
    start: Tensor  # (B, 1) int64: absolute position of each row's first image token

    def __call__(self, scores: Tensor, position: Tensor) -> Tensor:  # (B, M, V), (B, M)
        found = _blocked_table(self.grid, scores.shape[-1], scores.device)
        if found is None:
            return scores
        kinds, blocked = found
        offset = (position - self.start).clamp(0, self.grid.length)
        return scores.masked_fill(blocked[kinds[offset]], -torch.inf)

    def forced_tokens(self, position: Tensor) -> Tensor:  # (B, M) -> (B, M), -1 = free
        """The structural tokens at some positions."""
        table = _forced_table(self.grid, position.device)
        return table[(position - self.start).clamp(0, self.grid.length)]


@lru_cache(maxsize=16)
def _forced_table(grid: Grid, device: torch.device) -> Tensor:
    """Forced tokens by offset (L + 1,), -1 = a cell."""
    found = (grid.forced_token(offset) for offset in range(grid.length + 1))
    return torch.tensor([-1 if token is None else token for token in found], device=device)


@lru_cache(maxsize=16)
def _blocked_table(grid: Grid, size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The kind of every offset (L + 1,), and the tokens blocked for each of K kinds (K, size).

    None if nothing is blocked: only cells, and every token a code.
    """
    tokens, kinds = _forced_table(grid, device).unique(return_inverse=True)
    blocked = torch.arange(size, device=device) != tokens[:, None]
    ids = grid.ids(device)
    cells = torch.ones(size, dtype=torch.bool, device=device)
    cells[ids[ids < size]] = False
    blocked = torch.where(tokens[:, None] < 0, cells, blocked)
    return (kinds, blocked) if bool(blocked.any()) else None
