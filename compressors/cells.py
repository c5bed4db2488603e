"""Division of a grid into cells of equal size, per frame; runs without a grid.

stride 2 on 3 x 5      cells 0 0 1 1 2     centres  x . x . x     (upper left of the middle)
                             0 0 1 1 2              . . . . .
                             3 3 4 4 5              x . x . x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.compressors.contract import Compressor, Features, Grid, shape_of

PLACES = "the slot of the cell's centre"


@dataclass(frozen=True)
class GridCells:
    """The features of each of C cells."""

    cell: Tensor  # (n,) int64 cell of every feature
    place: Tensor  # (n,) int64 index of every feature in its cell, in raster order
    centre: Tensor  # (C,) int64 feature in the middle of every cell

    def sizes(self) -> Tensor:  # (C,)
        return torch.bincount(self.cell, minlength=len(self.centre))

    def stack_members(self, values: Tensor, area: int) -> Tensor:  # (n, H) -> (C, area, H)
        """The members of every cell; zeros where a cell exceeds the grid."""
        cells = values.new_zeros(len(self.centre), area, values.shape[1])
        cells[self.cell, self.place] = values
        return cells


@dataclass(frozen=True)
class CellCompressor(Compressor):
    """A compressor with one output feature per cell; stride=1 keeps all features."""

    stride: int = 2
    position_rule: ClassVar[str] = PLACES

    def __post_init__(self) -> None:
        check_stride(self.stride)

    def count(self, features: int, grid: Grid | None = None) -> int:
        return cell_count(features, grid, self.stride)


def divide_into_cells(features: Features, stride: int) -> GridCells:
    """Cells of `stride` x `stride`; runs of `stride`^2 features without a grid."""
    device = features.values.device
    frames, height, width = features.shape
    tall, wide = (1, stride**2) if features.grid is None else (stride, stride)
    row, row_place, row_centre = _bins(height, tall, device)
    column, column_place, column_centre = _bins(width, wide, device)
    rows, columns = len(row_centre), len(column_centre)
    frame = torch.arange(frames, device=device)[:, None, None]
    cell = (frame * rows + row[:, None]) * columns + column
    place = (row_place[:, None] * wide + column_place).expand(frames, -1, -1)
    centre = (frame * height + row_centre[:, None]) * width + column_centre
    return GridCells(cell.flatten(), place.flatten(), centre.flatten())


def cell_count(features: int, grid: Grid | None, stride: int) -> int:
    """The number of cells."""
    if grid is None:
        return -(-features // stride**2)
    frames, rows, columns = shape_of(features, grid)
    return frames * -(-rows // stride) * -(-columns // stride)


def check_stride(stride: int) -> None:
    """Check a stride. Raises ValueError below 1."""
    if stride < 1:
        raise ValueError(f"stride={stride} is not a cell size; give 1 (no pooling) or more")


def _bins(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The bin of every index (length,), its place in it, and the middle index of every bin."""
    index = torch.arange(length, device=device)
    first = index[::size]
    last = (first + size - 1).clamp_max(length - 1)
    return index // size, index % size, (first + last) // 2
