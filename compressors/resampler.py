"""One layer of cross-attention from learned queries to the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmspec.compressors.contract import Compressed, Features, Grid
from mmspec.compressors.learned import Learned, attend, check_heads, check_queries, place_queries


@dataclass(frozen=True)
class QueryResampler(Learned):
    """softmax(Q K^T / sqrt(d)) V with learned Q, K = k(X), V = v(X), and an output projection.

    The adaptor of ViSpec (Kang et al. 2025), without its global vector. Not causal and without
    positions, so the order of X does not matter. Initial weights: Q from N(0, 1 / d), torch
    defaults for linear maps.
    """

    queries: int = 32
    heads: int = 8
    position_rule: ClassVar[str] = "the last slots of the image"

    def __post_init__(self) -> None:
        check_queries(self.queries, self.heads)

    def count(self, features: int, grid: Grid | None = None) -> int:
        return min(self.queries, features)

    def network(self, width: int) -> nn.Module:
        check_heads(width, self.heads)
        return QueryReader(width, self.queries, self.heads)


class QueryReader(nn.Module):
    """One layer of cross-attention from learned queries."""

    def __init__(self, width: int, queries: int, heads: int) -> None:
        super().__init__()
        size = width // heads
        self.q = nn.Parameter(torch.randn(queries, heads, size) * size**-0.5)
        self.k_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        shape = self.q.shape[1:]
        key = self.k_proj(features.values).unflatten(-1, shape)
        value = self.v_proj(features.values).unflatten(-1, shape)
        return place_queries(self.o_proj(attend(self.q, key, value)), features, last=True)
