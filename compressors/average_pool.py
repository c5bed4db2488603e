"""Average neighbours: cells of the grid, or runs where there is no grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.compressors.cells import PLACES, cell_count, cells, check_stride
from mmspec.compressors.contract import Compressed, Compressor, Features, Grid


@dataclass(frozen=True)
class AveragePool(Compressor):
    """Mean over cells of `stride` x `stride` (IbED, Lee et al. 2024: 24 x 24 becomes 12 x 12).

    Without a grid, mean over runs of `stride`^2; of a video, frame by frame. Cells at the edge may
    be smaller. stride=1 is the identity.
    """

    stride: int = 2
    places: ClassVar[str] = PLACES

    def __post_init__(self) -> None:
        check_stride(self.stride)

    def count(self, features: int, grid: Grid | None = None) -> int:
        return cell_count(features, grid, self.stride)

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        values, found = features.values, cells(features, self.stride)
        sizes = found.sizes()
        total = values.new_zeros(len(sizes), values.shape[1], dtype=torch.float32)
        total = total.index_add(0, found.cell, values.float()) / sizes[:, None]
        return Compressed(total.to(values.dtype), features.positions[found.centre], sizes)
