"""Average pooling in reading order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.compressors.contract import Compressed, Features
from mmspec.compressors.selection import FixedShare, count_kept


@dataclass(frozen=True)
class AveragePool1d(FixedShare):
    """Adaptive mean over bins of equal length; the share `keep` is the number of bins.

    Bin i of m is [floor(i n / m), ceil((i + 1) n / m)), as in `adaptive_avg_pool1d`: bins overlap
    by one feature where m does not divide n. The grid is not used. A bin takes the slot of its last
    feature, as compressed tokens of ViSpec (Kang et al. 2025) are placed at the end of the image.
    keep=1 is the identity.
    """

    keep: float = 0.25
    position_rule: ClassVar[str] = "the slot of the bin's last feature"

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        values, length = features.values, len(features.values)
        bins = count_kept(self.keep, length)
        index = torch.arange(bins, device=values.device)
        first, stop = index * length // bins, -(-(index + 1) * length // bins)
        sums = values.new_zeros(length + 1, values.shape[1], dtype=torch.float64)
        sums[1:] = values.double().cumsum(0)
        mean = (sums[stop] - sums[first]) / (stop - first)[:, None]
        thin = values if bins == length else mean.to(values.dtype)
        return Compressed(thin, features.positions[stop - 1], stop - first)
