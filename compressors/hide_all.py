"""Drop every visual token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.compressors.contract import Compressed, Compressor, Features, Grid


@dataclass(frozen=True)
class HideAll(Compressor):
    """No visual tokens; the text keeps the slots it has after the image.

    In contrast, `sees="nothing"` (SPD-MLLM) renumbers the text and also removes the frame tokens.
    """

    position_rule: ClassVar[str] = "no features are left"

    def count(self, features: int, grid: Grid | None = None) -> int:
        return 0

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        none = features.positions[:0]
        return Compressed(features.values[:0], none, none)
