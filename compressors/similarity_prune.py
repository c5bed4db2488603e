"""Keep tokens of high attention that are not similar to a kept one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Features, Grid
from mmspec.compressors.selection import TokenSelection


@dataclass(frozen=True)
class SimilarityPrune(TokenSelection):
    """At most the share `keep`, by attention; none with a cosine above `limit` to a kept one.

    Greedy, from the token that the last prompt token attends to most. A generic definition. limit=1
    is plain top-k by attention, and with keep=1 the identity; limit=-1 keeps one token.
    """

    limit: float = 0.9
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.limit <= 1:
            raise ValueError(f"limit={self.limit} is not a cosine; give one in [-1, 1]")

    def count(self, features: int, grid: Grid | None = None) -> None:
        return None

    def select(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        direction = functional.normalize(features.values.float(), dim=-1)
        order = signals["attention"].sort(descending=True, stable=True).indices
        free = torch.ones_like(order, dtype=torch.bool)  # in order of attention
        kept: list[int] = []
        for _ in range(count):
            left = free.nonzero()[:, 0]
            if not len(left):
                break
            one = order[left[0]]
            kept.append(int(one))
            free[left[0]] = False
            if self.limit < 1:  # the cosine of equal tokens may exceed 1
                free &= (direction @ direction[one])[order] <= self.limit
        return torch.tensor(sorted(kept), device=order.device)
