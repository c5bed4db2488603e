"""Keep the visual tokens that the last prompt token attends to most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import KeptTokens, best


@dataclass(frozen=True)
class AttentionTopK(KeptTokens):
    """The share `keep` that the last prompt token attends to most, early in the target.

    FastV (Chen et al. 2024) prunes inside the model; here the drafter's picture is pruned and the
    target keeps all. At least one token is kept. Ties go to the earlier token. keep=1 is the
    identity.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    def kept(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        return best(signals["attention"], count)
