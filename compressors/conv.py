"""A strided convolution: a learned mean over cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmspec.compressors.cells import divide_into_cells
from mmspec.compressors.contract import Compressed, Features
from mmspec.compressors.learned import LearnedCells


@dataclass(frozen=True)
class Conv(LearnedCells):
    """A depthwise convolution of `stride` x `stride` with that stride, then a pointwise one.

    SpecVLM (Huang et al. 2025) has a strided convolution among its compressors; this separable one
    has H stride^2 + H^2 parameters. Cells at the edge are scaled to full cells. Initial weights are
    those of average pooling; with stride=1 the identity.
    """

    def network(self, width: int) -> nn.Module:
        return SeparableConv(width, self.stride)


class SeparableConv(nn.Module):
    """Weights (H, stride^2), in raster order, and (H, H)."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.depthwise = nn.Parameter(torch.full((width, stride**2), stride**-2.0))
        self.pointwise = nn.Parameter(torch.eye(width))

    def forward(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        found = divide_into_cells(features, self.stride)
        sizes, area = found.sizes(), self.stride**2
        whole = found.stack_members(features.values, area) * self.depthwise.T  # (C, area, H)
        thin = whole.sum(1) * (area / sizes[:, None]).to(whole.dtype)
        return Compressed(thin @ self.pointwise.T, features.positions[found.centre], sizes)
