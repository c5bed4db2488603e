"""A frequency test of the real loop: what a recipe samples, against a tiny model's own distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.bench.progress import Progress, silent
from mmspec.stats import Stats

LENGTH = 3  # tokens counted together: the first from the prefill, the others from a round
LEAST = 5.0  # expected counts below this are thrown together


@dataclass(frozen=True)
class Frequencies:
    """Chi-square of the first tokens' joint counts, and total variation of the first two."""

    samples: int
    statistic: float
    cells: int
    p_value: float
    distance: float
    floor: float  # mean distance that as many samples of the right distribution have

    def passes(self, alpha: float) -> bool:
        return self.p_value >= alpha


@dataclass(frozen=True)
class Subject:
    """What is sampled: (batch, first row id, seed) -> tokens (B, LENGTH), and their own distribution."""

    distribution: Tensor  # (V,) * LENGTH
    sample: Callable[[int, int, int], Tensor]


def frequencies(
    subject: Subject,
    samples: int = 6000,
    batch: int = 500,
    seed: int = 0,
    progress: Progress = silent,
) -> Frequencies:
    """Sample through the whole loop, rows of a batch being independent."""
    distribution = subject.distribution
    size = distribution.shape[0]
    counts = torch.zeros_like(distribution).flatten()
    drawn = 0
    while drawn < samples:
        tokens = subject.sample(batch, drawn, seed)
        code = torch.zeros(len(tokens), dtype=torch.int64)
        for step in range(LENGTH):
            code = code * size + tokens[:, step]
        counts += torch.bincount(code, minlength=counts.numel())
        drawn += len(tokens)
        progress("sample", min(drawn, samples), samples)
    statistic, cells = chi_square(counts, distribution.flatten() * drawn)
    pairs = counts.reshape(size * size, -1).sum(1) / drawn
    wanted = distribution.reshape(size * size, -1).sum(1)
    floor = (wanted * (1 - wanted) / drawn * 2 / torch.pi).sqrt().sum() / 2
    return Frequencies(
        drawn,
        statistic,
        cells,
        p_value(statistic, cells - 1),
        float((pairs - wanted).abs().sum() / 2),
        float(floor),
    )


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """The statistic and its number of cells; rare cells count as one."""
    rare = expected < LEAST
    left = torch.cat((expected[~rare], expected[rare].sum()[None]))
    seen = torch.cat((counts[~rare], counts[rare].sum()[None]))
    impossible = bool((seen[left == 0] > 0).any())
    seen, left = seen[left > 0], left[left > 0]
    return float("inf") if impossible else float(((seen - left) ** 2 / left).sum()), len(left)


def p_value(statistic: float, freedom: int) -> float:
    """Chance of a larger statistic under the right distribution."""
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def refuse_fallback(stats: Stats) -> None:
    """Plain decoding in the place of a drafter that failed would pass every test."""
    if stats.fallback is not None:
        raise ValueError(f"the drafter failed: {stats.fallback}")
