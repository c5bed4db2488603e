"""Keep the visual tokens that the target attends to most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.compressors.contract import Compressed, Features


@dataclass(frozen=True)
class AttentionTopK:
    """The share `keep` that the last prompt token attends to most, early in the target.

    FastV (Chen et al. 2024) prunes inside the model; here the drafter's picture is pruned and the
    target keeps all. Slots stay; at least one token is kept. Ties go to the earlier token.
    """

    keep: float = 0.5
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep={self.keep} is no share of the tokens; give one in (0, 1]")

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        attention = signals["attention"]  # (N,)
        count = max(round(self.keep * len(features.values)), 1)
        order = attention.sort(descending=True, stable=True).indices[:count]
        kept = order.sort().values
        positions = features.positions[kept]
        return Compressed(features.values[kept], positions, torch.ones_like(positions))
