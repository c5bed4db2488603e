"""Space-to-depth: concatenate the features of a cell and project them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmspec.compressors.cells import divide_into_cells
from mmspec.compressors.contract import Compressed, Features
from mmspec.compressors.learned import LearnedCells


@dataclass(frozen=True)
class SpaceToDepth(LearnedCells):
    """Cells of `stride` x `stride` become one feature of stride^2 H, projected to H.

    As in the merger of Qwen-VL before its language model. Cells beyond the edge are filled with
    zeros and scaled to full cells. Initial weights are those of average pooling; with stride=1 the
    identity.
    """

    def network(self, width: int) -> nn.Module:
        return Merger(width, self.stride)


class Merger(nn.Module):
    """One weight (H, stride^2 H), the members of a cell in raster order."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.eye(width).repeat(1, stride**2) / stride**2)

    def forward(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        found = divide_into_cells(features, self.stride)
        sizes, area = found.sizes(), self.stride**2
        thin = found.stack_members(features.values, area).flatten(1) @ self.weight.T
        thin = thin * (area / sizes[:, None]).to(thin.dtype)
        return Compressed(thin, features.positions[found.centre], sizes)
