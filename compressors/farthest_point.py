"""Keep visual tokens that are as different from each other as possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import TokenSelection


@dataclass(frozen=True)
class FarthestPoint(TokenSelection):
    """The share `keep` by farthest-point selection, with distance 1 - cosine.

    Starts with the token least similar to the mean direction, then repeatedly takes the token whose
    nearest selected one is farthest; ties go to the earlier token. Needs no scores (as DivPrune,
    Alvar et al. 2025, which starts with the farthest pair). keep=1 is the identity.
    """

    def select(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        direction = functional.normalize(features.values.float(), dim=-1)
        nearest = 1 - direction @ direction.mean(0)
        kept = nearest.argmax()[None]
        nearest = 1 - direction @ direction[kept[0]]
        for _ in range(count - 1):
            nearest[kept] = -torch.inf
            one = nearest.argmax()
            kept = torch.cat((kept, one[None]))
            nearest = torch.minimum(nearest, 1 - direction @ direction[one])
        return kept.sort().values
