"""Random distributions and codebooks for tests of verifiers and rules."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from mmspec.codes.codebook import Codebook, Neighbours


def vector(*entries: float) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64)


def book(size: int, seed: int = 0) -> Codebook:
    return Codebook.from_offset(torch.randn(size, 3, generator=torch.Generator().manual_seed(seed)))


def near(size: int, k: int) -> Neighbours:
    return book(size).neighbours(k)


def distributions(
    count: int, size: int, seed: int = 0
) -> tuple[Tensor, Tensor]:  # (count, size) twice
    scores = torch.randn(2, count, size, generator=torch.Generator().manual_seed(seed)).double()
    p, q = (1.5 * scores).softmax(-1)
    return p, q


def by_prefix(seed: int, size: int = 3) -> Callable[[tuple[int, ...]], Tensor]:
    """Distributions that depend on the whole prefix, with zeros."""

    def at(prefix: tuple[int, ...]) -> Tensor:
        draw = random.Random(f"{seed} {prefix}")
        weights = [draw.choice((0, 0, 1, 2, 3, 5)) for _ in range(size)]
        weights[draw.randrange(size)] += 1
        return torch.tensor(weights, dtype=torch.float64) / sum(weights)

    return at
