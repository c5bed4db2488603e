"""Merge the most similar visual tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Compressed, Features
from mmspec.compressors.selection import FixedShare, count_kept


@dataclass(frozen=True)
class BipartiteMerge(FixedShare):
    """Bipartite soft matching down to the share `keep` (ToMe, Bolya et al. 2023).

    Per round every even token selects the most similar odd one, and the r best pairs are merged,
    weighted by size; r is at most half of the tokens, so keep=0.25 takes two rounds. Similarity is
    the cosine of the features, not of the encoder's keys. Merged tokens are sorted by their mean
    index and take its (rounded) slot. sum(sizes) and sum(sizes * features) are preserved; keep=1 is
    the identity. Where all layers of the draft model use full attention, a token is weighted by its
    size there, unless weighted=false.
    """

    weighted: bool = True
    position_rule: ClassVar[str] = "the mean slot of the merged features"

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        count = len(features.values)
        target = count_kept(self.keep, count)
        values = features.values.float()
        sizes = torch.ones(count, device=values.device)
        index = torch.arange(count, device=values.device).float()
        while len(values) > target:
            links = min(len(values) - target, len(values) // 2)
            values, sizes, index = _merge(values, sizes, index, links)
        positions = features.positions[index.round().long()]
        return Compressed(values.to(features.values.dtype), positions, sizes.long())


def _merge(
    values: Tensor, sizes: Tensor, index: Tensor, links: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One round on (N, H), (N,), (N,): merge `links` even tokens into odd ones, sorted again."""
    direction = functional.normalize(values, dim=-1)
    best, partner = (direction[0::2] @ direction[1::2].T).max(-1)
    order = best.sort(descending=True, stable=True).indices
    target = torch.arange(len(values), device=values.device)
    merged = order[:links]
    target[2 * merged] = 2 * partner[merged] + 1
    total = torch.zeros_like(sizes).index_add(0, target, sizes)
    mean = torch.zeros_like(values).index_add(0, target, values * sizes[:, None])
    where = torch.zeros_like(index).index_add(0, target, index * sizes)
    left = total > 0
    total, mean, where = total[left], mean[left] / total[left, None], where[left] / total[left]
    order = where.sort(stable=True).indices
    return mean[order], total[order], where[order]
