"""Keep the visual tokens with most attention from the vision tower's class token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import TokenSelection, top_indices


@dataclass(frozen=True)
class ClsTopK(TokenSelection):
    """The share `keep` that the class token of the vision tower attends to most.

    As in FasterVLM (Zhang et al. 2024): before the language model, independent of the question.
    Needs a tower with a class token (CLIP). keep=1 is the identity.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"cls"})

    def select(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        return top_indices(signals["cls"], count)
