"""Keep the visual tokens that the last prompt token attends to most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import TokenSelection, top_indices


@dataclass(frozen=True)
class AttentionTopK(TokenSelection):
    """The share `keep` that the last prompt token attends to most, early in the target.

    FastV (Chen et al. 2024) prunes inside the model; here the drafter's image is pruned and the
    target keeps all tokens. At least one token is kept. Ties go to the earlier token. keep=1 is the
    identity.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    def select(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        return top_indices(signals["attention"], count)
