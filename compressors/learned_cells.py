"""What learned compressors of cells share: how many cells there are, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmspec.compressors.cells import PLACES, cell_count, check_stride
from mmspec.compressors.contract import Grid
from mmspec.compressors.learned import Learned


@dataclass(frozen=True)
class LearnedCells(Learned):
    """A learned map of every cell of `stride` x `stride` features; stride=1 keeps all."""

    stride: int = 2
    places: ClassVar[str] = PLACES

    def __post_init__(self) -> None:
        check_stride(self.stride)

    def count(self, features: int, grid: Grid | None = None) -> int:
        return cell_count(features, grid, self.stride)
