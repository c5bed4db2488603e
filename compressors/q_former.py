"""Learned queries that read the picture in several blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmspec.compressors.attending import Attention, check_heads, check_queries, placed
from mmspec.compressors.contract import Compressed, Features, Grid
from mmspec.compressors.learned import Learned


@dataclass(frozen=True)
class QFormer(Learned):
    """`blocks` of self-attention, attention to the picture and a feed-forward net (BLIP-2).

    Li et al. 2023, as a generic compressor: normalised before each part, residual around it.
    Initial weights: queries from N(0, 0.02^2), linear maps as torch makes them.
    """

    queries: int = 32
    heads: int = 8
    blocks: int = 2
    places: ClassVar[str] = "the last slots of the picture"

    def __post_init__(self) -> None:
        check_queries(self.queries, self.heads)
        if self.blocks < 1:
            raise ValueError(f"blocks={self.blocks} reads nothing; give at least 1")

    def count(self, features: int, grid: Grid | None = None) -> int:
        return min(self.queries, features)

    def network(self, width: int) -> nn.Module:
        check_heads(width, self.heads)
        return QueryTransformer(width, self.queries, self.heads, self.blocks)


class QueryTransformer(nn.Module):
    """Learned queries (m, H) and the blocks that they go through."""

    def __init__(self, width: int, queries: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, width) * 0.02)
        self.blocks = nn.ModuleList(QueryBlock(width, heads) for _ in range(blocks))

    def forward(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        found: Tensor = self.queries
        for one in self.blocks:
            found = one(found, features.values)
        return placed(found, features, last=True)


class QueryBlock(nn.Module):
    """Self-attention, attention to the picture, and a feed-forward net of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, heads), Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, queries: Tensor, values: Tensor) -> Tensor:  # (m, H), (n, H) -> (m, H)
        asking = self.norms[0](queries)
        queries = queries + self.own(asking, asking)
        queries = queries + self.cross(self.norms[1](queries), values)
        made: Tensor = self.down(nn.functional.gelu(self.up(self.norms[2](queries))))
        return queries + made
