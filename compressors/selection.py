"""Choosing features: how many are kept, which, and in what order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.compressors.contract import Compressed, Compressor, Features, Grid

KEPT = "a kept feature stays at its own slot"


@dataclass(frozen=True)
class ShareOf(Compressor):
    """Makes the share `keep` of as many features as there are."""

    keep: float = 0.5

    def __post_init__(self) -> None:
        check_keep(self.keep)

    def count(self, features: int, grid: Grid | None = None) -> int | None:
        return budget(self.keep, features)


@dataclass(frozen=True)
class KeptTokens(ShareOf):
    """Keeps the share `keep` of the features as they are; which ones is said by `kept`."""

    places: ClassVar[str] = KEPT

    @abstractmethod
    def kept(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        """Ascending indices of `count` features (at most, where `count()` is None)."""

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        count = budget(self.keep, len(features.values))
        return chosen(features, self.kept(features, signals, count))


def check_keep(keep: float) -> None:
    """Refuse a share that is none. Raises ValueError."""
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} is no share of the tokens; give one in (0, 1]")


def budget(keep: float, count: int) -> int:
    """How many of `count` features the share `keep` is; at least one where there is any."""
    return min(max(round(keep * count), 1), count)


def best(scores: Tensor, count: int) -> Tensor:  # (n,) -> (count,)
    """Indices of the highest scores, ascending; ties go to the earlier one."""
    order = scores.sort(descending=True, stable=True).indices[:count]
    return order.sort().values


def chosen(features: Features, kept: Tensor) -> Compressed:
    """The features at ascending indices `kept` (m,), each at its slot."""
    positions = features.positions[kept]
    return Compressed(features.values[kept], positions, torch.ones_like(positions))
