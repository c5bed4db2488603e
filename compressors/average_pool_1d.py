"""Average runs of features in reading order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.compressors.contract import Compressed, Features
from mmspec.compressors.selection import ShareOf, budget


@dataclass(frozen=True)
class AveragePool1d(ShareOf):
    """Adaptive mean over as many bins of equal length as the share `keep` is.

    Bin i of m is [floor(i n / m), ceil((i + 1) n / m)), as `adaptive_avg_pool1d` has it: bins
    overlap by one feature where m does not divide n. The grid does not count. A bin stands at the
    slot of its last feature, as compressed tokens of ViSpec (Kang et al. 2025) stand at the end of
    the picture. keep=1 is the identity.
    """

    keep: float = 0.25
    places: ClassVar[str] = "the slot of the bin's last feature"

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        values, length = features.values, len(features.values)
        bins = budget(self.keep, length)
        index = torch.arange(bins, device=values.device)
        first, stop = index * length // bins, -(-(index + 1) * length // bins)
        sums = values.new_zeros(length + 1, values.shape[1], dtype=torch.float64)
        sums[1:] = values.double().cumsum(0)
        mean = (sums[stop] - sums[first]) / (stop - first)[:, None]
        thin = values if bins == length else mean.to(values.dtype)
        return Compressed(thin, features.positions[stop - 1], stop - first)
