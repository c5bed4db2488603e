"""Selection of features: how many are kept, which, and in what order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.compressors.contract import Compressed, Compressor, Features, Grid

OWN_SLOT = "a kept feature stays at its own slot"


@dataclass(frozen=True)
class FixedShare(Compressor):
    """A compressor whose output is the share `keep` of the features."""

    keep: float = 0.5

    def __post_init__(self) -> None:
        check_keep(self.keep)

    def count(self, features: int, grid: Grid | None = None) -> int | None:
        return count_kept(self.keep, features)


@dataclass(frozen=True)
class TokenSelection(FixedShare):
    """Keeps the share `keep` of the features unchanged; subclasses select the indices."""

    position_rule: ClassVar[str] = OWN_SLOT

    @abstractmethod
    def select(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        """Ascending indices of `count` features (at most, where `count()` is None)."""

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        count = count_kept(self.keep, len(features.values))
        return select_features(features, self.select(features, signals, count))


def check_keep(keep: float) -> None:
    """Check a share of the tokens. Raises ValueError outside (0, 1]."""
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} is not a share of the tokens; give one in (0, 1]")


def count_kept(keep: float, count: int) -> int:
    """The number of features in the share `keep` of `count`; at least one if there is any.

    Rounded down, as the papers and releases do; a product that is whole but for the floating point
    (0.29 of 100) is whole.
    """
    return min(max(int(keep * count + 1e-9), 1), count)


def top_indices(scores: Tensor, count: int) -> Tensor:  # (n,) -> (count,)
    """Indices of the highest scores, ascending; ties go to the earlier one."""
    order = scores.sort(descending=True, stable=True).indices[:count]
    return order.sort().values


def select_features(features: Features, indices: Tensor) -> Compressed:
    """The features at ascending `indices` (m,), each at its slot."""
    positions = features.positions[indices]
    return Compressed(features.values[indices], positions, torch.ones_like(positions))
