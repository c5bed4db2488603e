"""Keep tokens with high attention, and those that changed between frames (SpecPrune-VLA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Compressed, Compressor, Features
from mmspec.compressors.selection import (
    OWN_SLOT,
    check_keep,
    count_kept,
    select_features,
    top_indices,
)


@dataclass(frozen=True)
class ActionPrune(Compressor):
    """Global, local and dynamic tokens of a robot's image (Wang et al. 2026, SpecPrune-VLA).

    Kept are the most attended tokens of the previous step (global) and of this one (local), each
    the share `coarse` of all tokens, or `fine` during precise motion, and the tokens that changed
    (dynamic). A token is static if its cosine with an earlier frame is at least `limit` and it is
    among the share `static` of the most similar ones. The first frame is kept whole. limit=1 is the
    identity.

    Reconstructed: features are compared instead of pixels, and one static share serves both modes.
    The paper's further pruning between later layers is omitted: it needs another forward.
    """

    coarse: float = 24 / 256
    fine: float = 40 / 256
    static: float = 200 / 256
    limit: float = 0.986
    needs: ClassVar[frozenset[str]] = frozenset(
        {"attention", "earlier-attention", "earlier-features", "precision"}
    )
    position_rule: ClassVar[str] = OWN_SLOT

    def __post_init__(self) -> None:
        for share in (self.coarse, self.fine, self.static):
            check_keep(share)
        if not -1 <= self.limit <= 1:
            raise ValueError(f"limit={self.limit} is not a cosine; give one in [-1, 1]")

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        total = len(features.values)
        if not total:
            return select_features(features, features.positions)
        earlier = signals["earlier-features"].to(features.values).float()
        cosine = functional.cosine_similarity(features.values.float(), earlier, dim=-1)
        is_static = (cosine >= self.limit) & earlier.any(-1)
        is_static &= self.limit < 1  # rounding may exceed 1
        is_similar = torch.zeros_like(is_static)
        is_similar[top_indices(cosine, count_kept(self.static, total))] = True
        selected = ~(is_static & is_similar)
        count = count_kept(self.fine if bool(signals["precision"].any()) else self.coarse, total)
        for name in ("attention", "earlier-attention"):
            if bool(signals[name].any()):
                selected[top_indices(signals[name].to(selected.device), count)] = True
        return select_features(features, selected.nonzero()[:, 0])
