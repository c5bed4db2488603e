"""Drop every visual token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.compressors.contract import Compressed, Compressor, Features, Grid


@dataclass(frozen=True)
class HideAll(Compressor):
    """No picture at all; the text keeps the slots it has behind the picture.

    That is the difference to `sees="nothing"` (SPD-MLLM), which numbers the text anew and takes
    out the frame tokens as well.
    """

    places: ClassVar[str] = "nothing is left to place"

    def count(self, features: int, grid: Grid | None = None) -> int:
        return 0

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        none = features.positions[:0]
        return Compressed(features.values[:0], none, none)
