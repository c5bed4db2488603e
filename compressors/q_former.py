"""Learned queries that attend to the image in several blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmspec.compressors.contract import Compressed, Features, Grid
from mmspec.compressors.learned import Attention, Learned, check_heads, check_queries, place_queries


@dataclass(frozen=True)
class QFormer(Learned):
    """`blocks` of self-attention, cross-attention to the image and a feed-forward network (BLIP-2).

    Li et al. 2023, as a generic compressor: pre-norm with residual connections. Initial weights:
    queries from N(0, 0.02^2), torch defaults for linear maps.
    """

    queries: int = 32
    heads: int = 8
    blocks: int = 2
    position_rule: ClassVar[str] = "the last slots of the image"

    def __post_init__(self) -> None:
        check_queries(self.queries, self.heads)
        if self.blocks < 1:
            raise ValueError(f"blocks={self.blocks}; give at least 1")

    def count(self, features: int, grid: Grid | None = None) -> int:
        return min(self.queries, features)

    def network(self, width: int) -> nn.Module:
        check_heads(width, self.heads)
        return QueryTransformer(width, self.queries, self.heads, self.blocks)


class QueryTransformer(nn.Module):
    """Learned queries (m, H) and the blocks applied to them."""

    def __init__(self, width: int, queries: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, width) * 0.02)
        self.blocks = nn.ModuleList(QueryBlock(width, heads) for _ in range(blocks))

    def forward(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        found: Tensor = self.queries
        for one in self.blocks:
            found = one(found, features.values)
        return place_queries(found, features, last=True)


class QueryBlock(nn.Module):
    """Self-attention, cross-attention to the image, and a feed-forward network of 4 x width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, heads), Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, queries: Tensor, values: Tensor) -> Tensor:  # (m, H), (n, H) -> (m, H)
        normed = self.norms[0](queries)
        queries = queries + self.own(normed, normed)
        queries = queries + self.cross(self.norms[1](queries), values)
        update: Tensor = self.down(nn.functional.gelu(self.up(self.norms[2](queries))))
        return queries + update
