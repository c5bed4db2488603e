"""Keep the visual tokens that the question attends to most, in the last layer of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import TokenSelection, top_indices


@dataclass(frozen=True)
class DreamTopK(TokenSelection):
    """The share `keep` by the mean attention of the last layer, over heads and queries (DREAM).

    Hu et al. 2025, whose release averages over all queries of the prompt; under a causal mask that
    favours early tokens, so here the queries are those of the question. keep=1 is the identity.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"last-layer-attention"})

    def select(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        return top_indices(signals["last-layer-attention"], count)
