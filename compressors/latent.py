"""Learned latent queries: weighted means of the image features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmspec.compressors.contract import Compressed, Features, Grid
from mmspec.compressors.learned import Learned, check_queries, place_queries


@dataclass(frozen=True)
class Latent(Learned):
    """softmax(A X^T) X with learned A (SpecFLASH, Wang et al. 2025, 64 queries).

    Each output is a convex combination of features. The paper compresses features of the target's
    last layer; this compressor uses those of the vision tower. Initial weights: N(0, 1 / H).
    """

    queries: int = 64
    position_rule: ClassVar[str] = "the first slots of the image"

    def __post_init__(self) -> None:
        check_queries(self.queries)

    def count(self, features: int, grid: Grid | None = None) -> int:
        return min(self.queries, features)

    def network(self, width: int) -> nn.Module:
        return Directions(width, self.queries)


class Directions(nn.Module):
    """One weight (queries, H)."""

    def __init__(self, width: int, queries: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(queries, width) * width**-0.5)

    def forward(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        share = (self.weight @ features.values.T).softmax(-1)
        return place_queries(share @ features.values, features, last=False)
