"""Keep what an action needs: what was and is attended to, and what has moved (SpecPrune-VLA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Compressed, Compressor, Features
from mmspec.compressors.selection import KEPT, best, budget, check_keep, chosen


@dataclass(frozen=True)
class ActionPrune(Compressor):
    """Global, local and dynamic tokens of a robot's picture (Wang et al. 2026, SpecPrune-VLA).

    Kept are the most attended tokens of the step before (global) and of this one (local), the share
    `coarse` or, where the robot works finely, `fine` of all tokens each; and those that changed
    (dynamic): a token is static where its cosine with an earlier frame is at least `limit`, and it
    is among the share `static` of the most similar ones. The first frame is kept whole. limit=1 is
    the identity.

    Reconstructed: features are compared and not pixels, and one static share serves both modes. The
    paper's further pruning between later layers is left out: it takes another forward.
    """

    coarse: float = 24 / 256
    fine: float = 40 / 256
    static: float = 200 / 256
    limit: float = 0.986
    needs: ClassVar[frozenset[str]] = frozenset(
        {"attention", "earlier-attention", "earlier-features", "precision"}
    )
    places: ClassVar[str] = KEPT

    def __post_init__(self) -> None:
        for share in (self.coarse, self.fine, self.static):
            check_keep(share)
        if not -1 <= self.limit <= 1:
            raise ValueError(f"limit={self.limit} is no cosine; give one in [-1, 1]")

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        total = len(features.values)
        if not total:
            return chosen(features, features.positions)
        earlier = signals["earlier-features"].to(features.values).float()
        cosine = functional.cosine_similarity(features.values.float(), earlier, dim=-1)
        is_static = (cosine >= self.limit) & earlier.any(-1)
        is_static &= self.limit < 1  # rounding may pass 1
        alike = torch.zeros_like(is_static)
        alike[best(cosine, budget(self.static, total))] = True
        kept = ~(is_static & alike)
        count = budget(self.fine if bool(signals["precision"].any()) else self.coarse, total)
        for name in ("attention", "earlier-attention"):
            if bool(signals[name].any()):
                kept[best(signals[name].to(kept.device), count)] = True
        return chosen(features, kept.nonzero()[:, 0])
