"""Average pooling over grid cells, or over runs without a grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.compressors.cells import CellCompressor, divide_into_cells
from mmspec.compressors.contract import Compressed, Features


@dataclass(frozen=True)
class AveragePool(CellCompressor):
    """Mean over cells of `stride` x `stride` (IbED, Lee et al. 2024: 24 x 24 becomes 12 x 12).

    Without a grid, mean over runs of `stride`^2; videos are pooled per frame. Cells at the edge may
    be smaller. stride=1 is the identity.
    """

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        values, found = features.values, divide_into_cells(features, self.stride)
        sizes = found.sizes()
        total = values.new_zeros(len(sizes), values.shape[1], dtype=torch.float32)
        total = total.index_add(0, found.cell, values.float()) / sizes[:, None]
        return Compressed(total.to(values.dtype), features.positions[found.centre], sizes)
