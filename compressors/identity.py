"""Keep every visual token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.compressors.contract import Compressed, Features, keep_all


@dataclass(frozen=True)
class Identity:
    """The picture as it is; the baseline of this shelf."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        return keep_all(features)
