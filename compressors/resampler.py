"""A few learned queries read the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmspec.compressors.attending import attended, check_heads, check_queries, placed
from mmspec.compressors.contract import Compressed, Features, Grid
from mmspec.compressors.learned import Learned


@dataclass(frozen=True)
class QueryResampler(Learned):
    """softmax(Q K^T / sqrt(d)) V with learned Q, K = k(X), V = v(X), and a map of the outcome.

    The adaptor of ViSpec (Kang et al. 2025), without its global vector. Not causal and without
    positions, so the order of X does not count. Initial weights: Q from N(0, 1 / d), linear maps
    as torch makes them.
    """

    queries: int = 32
    heads: int = 8
    places: ClassVar[str] = "the last slots of the picture"

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
        return placed(self.o_proj(attended(self.q, key, value)), features, last=True)
