"""Statistical tests of real-valued samples, against other samples and the normal distribution.

Functions return p-values; several statistics tested together are corrected (Bonferroni).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def moments(left: Tensor, right: Tensor) -> float:  # (n, d), (m, d)
    """Test that means and second moments of two samples agree."""
    pairs = [_monomials(one.double()) for one in (left, right)]
    gap = pairs[0].mean(0) - pairs[1].mean(0)
    error = sum((one.var(0) / len(one) for one in pairs), torch.zeros_like(gap))
    return normal_p_value(gap / error.sqrt())


def kolmogorov(left: Tensor, right: Tensor) -> tuple[float, float]:  # (n,), (m,)
    """Two-sample Kolmogorov-Smirnov statistic, and its asymptotic p-value."""
    both = torch.cat((left, right)).sort().values
    levels = [
        torch.searchsorted(one.sort().values, both, right=True).double() / len(one)
        for one in (left, right)
    ]
    gap = float((levels[0] - levels[1]).abs().max())
    return gap, kolmogorov_p_value(gap / math.sqrt(1 / len(left) + 1 / len(right)))


def kolmogorov_p_value(statistic: float) -> float:
    """Probability that the maximum of a Brownian bridge exceeds `statistic`."""
    if statistic < 0.3:
        return 1.0
    signs = (1.0 if k % 2 else -1.0 for k in range(1, 40))
    terms = (2 * sign * math.exp(-2 * (k * statistic) ** 2) for k, sign in enumerate(signs, 1))
    return min(1.0, max(0.0, sum(terms)))


def normal_p_value(scores: Tensor) -> float:  # (k,)
    """Two-sided bound on the probability that the largest of k normal scores is as large."""
    return min(1.0, len(scores) * math.erfc(float(scores.abs().max()) / math.sqrt(2)))


def _monomials(x: Tensor) -> Tensor:  # (n, d) -> (n, d + d (d + 1) / 2)
    row, column = torch.triu_indices(x.shape[1], x.shape[1])
    return torch.cat((x, x[:, row] * x[:, column]), 1)


def standard_normal_p_values(found: Tensor) -> list[float]:
    """Kolmogorov-Smirnov tests against N(0, 1): of each cell, and of pairs (independence)."""
    columns = list(found.unbind(1))
    count = len(columns)
    pairs = [(i, j) for i in range(count) for j in range(i)]
    columns += [(found[:, i] + sign * found[:, j]) / 2**0.5 for i, j in pairs for sign in (1, -1)]
    return [uniform_p_value(torch.special.ndtr(column)) for column in columns]


def uniform_p_value(levels: Tensor) -> float:  # (n,)
    """Kolmogorov-Smirnov test of numbers against the uniform distribution on (0, 1)."""
    return kolmogorov_p_value(uniform_gap(levels) * len(levels) ** 0.5)


def uniform_gap(levels: Tensor) -> float:  # (n,)
    """Return the largest distance of the empirical distribution function from the diagonal."""
    levels, count = levels.sort().values, len(levels)
    grid = torch.arange(1, count + 1) / count
    return float(torch.maximum(grid - levels, levels - grid + 1 / count).max())
