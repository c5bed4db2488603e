"""Drop tokens that have not changed since an earlier frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Compressed, Compressor, Features
from mmspec.compressors.selection import OWN_SLOT, select_features


@dataclass(frozen=True)
class TemporalRedundancy(Compressor):
    """Drop a token whose cosine with the last kept one of its cell exceeds `limit`.

    A generic definition. The first frame is kept whole, and therefore an image or a video without a
    grid; slow change is detected, because the comparison is with the last kept token and not with
    the previous frame. limit=1 is the identity.
    """

    limit: float = 0.9
    position_rule: ClassVar[str] = OWN_SLOT

    def __post_init__(self) -> None:
        if not -1 <= self.limit <= 1:
            raise ValueError(f"limit={self.limit} is not a cosine; give one in [-1, 1]")

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        frames, rows, columns = features.shape
        direction = functional.normalize(features.values.float(), dim=-1)
        direction = direction.view(frames, rows * columns, -1)
        last, kept = direction[0], [torch.ones_like(direction[0, :, 0], dtype=torch.bool)]
        for frame in direction[1:]:
            cosine = (frame * last).sum(-1)
            is_new = (cosine <= self.limit) | (self.limit == 1)  # rounding may exceed 1
            last = torch.where(is_new[:, None], frame, last)
            kept.append(is_new)
        return select_features(features, torch.cat(kept).nonzero()[:, 0])
