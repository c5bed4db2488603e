"""Learned queries that attend to a picture, and where what they found stands."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.compressors.contract import Compressed, Features


class Attention(nn.Module):
    """Attention over heads without a mask: linear maps of queries, keys, values and the outcome."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, asking: Tensor, asked: Tensor) -> Tensor:  # (m, H), (n, H) -> (m, H)
        query, key, value = (
            one.unflatten(-1, (self.heads, -1))
            for one in (self.query(asking), self.key(asked), self.value(asked))
        )
        found: Tensor = self.out(attended(query, key, value))
        return found


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention of (m, heads, d) over (n, heads, d); gives (m, heads * d)."""
    query, key, value = (one.transpose(0, 1) for one in (query, key, value))
    found = functional.scaled_dot_product_attention(query, key, value)
    return found.transpose(0, 1).flatten(1)


def check_queries(queries: int, heads: int = 1) -> None:
    """Refuse numbers that are none. Raises ValueError."""
    if queries < 1 or heads < 1:
        raise ValueError(f"queries={queries}, heads={heads}: give at least 1 of each")


def check_heads(width: int, heads: int) -> None:
    """Refuse heads that do not divide the width. Raises ValueError."""
    if width % heads:
        raise ValueError(f"heads={heads} does not divide the features' width of {width}")


def placed(found: Tensor, features: Features, last: bool) -> Compressed:
    """What m queries found, at the first or the last m slots of the picture, in their order.

    Of a picture with fewer slots than queries, as many queries as it has slots count.
    """
    count = min(len(found), len(features.values))
    where = slice(len(features.values) - count, None) if last else slice(count)
    positions = features.positions[where]
    size = max(len(features.values) // max(count, 1), 1)  # each stands for an even share
    return Compressed(found[:count], positions, torch.full_like(positions, size))
