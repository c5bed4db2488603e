"""Average neighbours: cells of the grid, or runs where there is no grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.compressors.contract import Compressed, Features


@dataclass(frozen=True)
class AveragePool:
    """Mean over cells of `stride` x `stride` (IbED, Lee et al. 2024: 24 x 24 becomes 12 x 12).

    Without a grid, mean over runs of `stride`^2. Cells at the edge may be smaller. The slot is
    that of the cell's centre, the upper left one of the middle. stride=1 is the identity.
    """

    stride: int = 2
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(
                f"stride={self.stride} is no cell size; give 1 (nothing pooled) or more"
            )

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        values, device = features.values, features.values.device
        if features.grid is None:
            height, width, tall, wide = 1, len(values), 1, self.stride**2
        else:
            (height, width), tall, wide = features.grid, self.stride, self.stride
        row, row_centre = _bins(height, tall, device)
        column, column_centre = _bins(width, wide, device)
        cell = (row[:, None] * len(column_centre) + column).flatten()
        centre = (row_centre[:, None] * width + column_centre).flatten()
        sizes = torch.bincount(cell, minlength=len(centre))
        total = values.new_zeros(len(centre), values.shape[1], dtype=torch.float32)
        total = total.index_add(0, cell, values.float()) / sizes[:, None]
        return Compressed(total.to(values.dtype), features.positions[centre], sizes)


def _bins(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The bin of every index (length,), and the middle index of every bin."""
    index = torch.arange(length, device=device)
    first = index[::size]
    last = (first + size - 1).clamp_max(length - 1)
    return index // size, (first + last) // 2
