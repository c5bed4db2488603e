"""Where the tokens of a generated picture lie: a header, rows of codes in raster order, a footer.

Offsets count new tokens from 0, the first one after the prompt:

    Grid(2, 3, separator=9, header=(7,), footer=(8,))

    offset   0   1  2  3  4   5  6  7  8   9
    token    7   c  c  c  9   c  c  c  9   8      c = some code, the others are forced
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Grid:
    """The layout of `height` x `width` codes behind a prompt.

    `separator` ends every row, the last one too. `codes` are the ids that a cell may hold: first
    and stop of a range, or a tensor (C,) int64 of ids.
    """

    height: int
    width: int
    codes: tuple[int, int] | Tensor
    separator: int | None = None
    header: tuple[int, ...] = ()  # forced tokens before the first row
    footer: tuple[int, ...] = ()  # forced tokens behind the last row

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(
                f"a grid of {self.height} x {self.width} has no cells; give 1 x 1 or more"
            )
        if not isinstance(self.codes, Tensor) and not 0 <= self.codes[0] < self.codes[1]:
            raise ValueError(
                f"codes={self.codes} is no range of ids; give (first, stop) with 0 <= first < stop"
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
        """Tokens of the whole picture."""
        return len(self.header) + self.height * self.period + len(self.footer)

    @property
    def cells(self) -> int:
        return self.height * self.width

    def ids(self, device: torch.device | None = None) -> Tensor:  # (C,) int64
        """The ids that a cell may hold."""
        if isinstance(self.codes, Tensor):
            return self.codes.to(device)
        return torch.arange(*self.codes, device=device)

    def cell(self, offset: int) -> tuple[int, int] | None:
        """Row and column of the code there; None where no code stands."""
        row, column = divmod(offset - len(self.header), self.period)
        return (row, column) if 0 <= row < self.height and column < self.width else None

    def offset(self, row: int, column: int) -> int:
        """Where the code of a cell stands. Raises ValueError for a cell outside the grid."""
        if not (0 <= row < self.height and 0 <= column < self.width):
            raise ValueError(
                f"({row}, {column}) lies outside a grid of {self.height} x {self.width}; rows and "
                "columns count from 0"
            )
        return len(self.header) + row * self.period + column

    def forced(self, offset: int) -> int | None:
        """The only token that may stand there; None for a cell, and outside the picture."""
        if 0 <= offset < len(self.header):
            return self.header[offset]
        behind = offset - (self.length - len(self.footer))
        if 0 <= behind < len(self.footer):
            return self.footer[behind]
        inside = 0 <= offset < self.length
        return self.separator if inside and self.cell(offset) is None else None
