"""Put neighbours beside each other, and learn what to make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmspec.compressors.cells import cells
from mmspec.compressors.contract import Compressed, Features
from mmspec.compressors.learned_cells import LearnedCells


@dataclass(frozen=True)
class SpaceToDepth(LearnedCells):
    """Cells of `stride` x `stride` become one feature of stride^2 H, and that H by a linear map.

    As the merger of Qwen-VL does before its language model. Cells that the edge cuts off are filled
    with zeros and scaled as if they were whole. Initial weights are those of average pooling; with
    stride=1 the identity.
    """

    def network(self, width: int) -> nn.Module:
        return Merger(width, self.stride)


class Merger(nn.Module):
    """One weight (H, stride^2 H), the members of a cell line by line."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.eye(width).repeat(1, stride**2) / stride**2)

    def forward(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        found = cells(features, self.stride)
        sizes, area = found.sizes(), self.stride**2
        thin = found.stacked(features.values, area).flatten(1) @ self.weight.T
        thin = thin * (area / sizes[:, None]).to(thin.dtype)
        return Compressed(thin, features.positions[found.centre], sizes)
