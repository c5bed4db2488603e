"""Keep the visual tokens that stand out to the vision tower itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import KeptTokens, best


@dataclass(frozen=True)
class ClsTopK(KeptTokens):
    """The share `keep` that the class token of the vision tower attends to most.

    As FasterVLM (Zhang et al. 2024) prunes: before the language model, whatever the question is.
    Needs a tower with a class token (CLIP). keep=1 is the identity.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"cls"})

    def kept(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        return best(signals["cls"], count)
