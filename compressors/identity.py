"""Keep every visual token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.compressors.contract import Compressed, Compressor, Features, Grid, keep_all
from mmspec.compressors.selection import KEPT


@dataclass(frozen=True)
class Identity(Compressor):
    """The picture as it is; the baseline of this shelf."""

    places: ClassVar[str] = KEPT

    def count(self, features: int, grid: Grid | None = None) -> int:
        return features

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        return keep_all(features)
