"""Frequency test of the whole loop: samples against a tiny model's exact distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.bench.reporting import Progress, silent
from mmspec.stats import Stats

LENGTH = 3  # tokens counted together: the first from the prefill, the others from a round
MIN_EXPECTED = 5.0  # cells with smaller expected counts are merged


@dataclass(frozen=True)
class Frequencies:
    """Chi-square of the joint counts of the first tokens, and total variation of the first two."""

    samples: int
    statistic: float
    cells: int
    p_value: float
    distance: float
    floor: float  # mean distance of as many samples of the exact distribution

    def passes(self, alpha: float) -> bool:
        return self.p_value >= alpha


@dataclass(frozen=True)
class Subject:
    """A sampler, (batch, first row id, seed) -> tokens (B, LENGTH), and its exact distribution."""

    distribution: Tensor  # (V,) * LENGTH
    sample: Callable[[int, int, int], Tensor]


def measure_frequencies(
    subject: Subject,
    samples: int = 6000,
    batch: int = 500,
    seed: int = 0,
    progress: Progress = silent,
) -> Frequencies:
    """Sample through the whole loop; rows of a batch are independent."""
    distribution = subject.distribution
    size = distribution.shape[0]
    counts = torch.zeros_like(distribution).flatten()
    count = 0
    while count < samples:
        tokens = subject.sample(batch, count, seed)
        code = torch.zeros(len(tokens), dtype=torch.int64)
        for step in range(LENGTH):
            code = code * size + tokens[:, step]
        counts += torch.bincount(code, minlength=counts.numel())
        count += len(tokens)
        progress("sample", min(count, samples), samples)
    statistic, cells = chi_square(counts, distribution.flatten() * count)
    pairs = counts.reshape(size * size, -1).sum(1) / count
    expected = distribution.reshape(size * size, -1).sum(1)
    floor = (expected * (1 - expected) / count * 2 / torch.pi).sqrt().sum() / 2
    return Frequencies(
        count,
        statistic,
        cells,
        p_value(statistic, cells - 1),
        float((pairs - expected).abs().sum() / 2),
        float(floor),
    )


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Return the statistic and the number of cells; rare cells are merged."""
    rare = expected < MIN_EXPECTED
    left = torch.cat((expected[~rare], expected[rare].sum()[None]))
    seen = torch.cat((counts[~rare], counts[rare].sum()[None]))
    impossible = bool((seen[left == 0] > 0).any())
    seen, left = seen[left > 0], left[left > 0]
    return float("inf") if impossible else float(((seen - left) ** 2 / left).sum()), len(left)


def p_value(statistic: float, freedom: int) -> float:
    """Probability of a larger statistic under the exact distribution."""
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def refuse_fallback(stats: Stats) -> None:
    """Raise ValueError where the drafter failed, as plain decoding would pass every test."""
    if stats.fallback is not None:
        raise ValueError(f"the drafter failed: {stats.fallback}")
