"""Tests of samples: against other samples, and of a chain's noise against the normal law.

Every function gives a p-value: the chance of something as odd, were the law right. Several numbers
looked at together count as one test (Bonferroni).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmspec.bench.chains import Setting
from mmspec.bench.frequency import LEAST, p_value
from mmspec.bench.mixture import Mixture

DIRECTIONS = 4  # random ones, besides the axes


def moments(left: Tensor, right: Tensor) -> float:  # (n, d), (m, d)
    """Means and second moments of two samples agree."""
    pairs = [_monomials(one.double()) for one in (left, right)]
    gap = pairs[0].mean(0) - pairs[1].mean(0)
    error = sum((one.var(0) / len(one) for one in pairs), torch.zeros_like(gap))
    return normal_p_value(gap / error.sqrt())


def cells(data: Mixture, left: Tensor, right: Tensor) -> float:  # (n, d), (m, d)
    """Equal shares of two samples in the cells of space: component, and which way from its mean."""
    counts = [
        torch.bincount(_cell(data, one), minlength=4 * len(data.weights)).double()
        for one in (left, right)
    ]
    rare = counts[0] + counts[1] < 2 * LEAST
    counts = [torch.cat((c[~rare], c[rare].sum()[None])) for c in counts]
    both = counts[0] + counts[1]
    counts, both = [c[both > 0] for c in counts], both[both > 0]
    scale = math.sqrt(len(right) / len(left))
    statistic = (counts[0] * scale - counts[1] / scale).square() / both
    return p_value(float(statistic.sum()), len(both) - 1)


def lines(data: Mixture, left: Tensor, right: Tensor) -> float:  # (n, d), (m, d)
    """Equal distribution along the axes, along random lines, and of the density (KS)."""
    found = [kolmogorov(a, b) for a, b in zip(*_seen(data, left, right), strict=True)]
    return min(1.0, len(found) * min(p for _, p in found))


def distance(data: Mixture, left: Tensor, right: Tensor) -> tuple[float, float]:
    """Largest gap between distribution functions along those lines, and the mean gap by chance.

    The latter is that of one line; the largest of several is somewhat more.
    """
    found = [kolmogorov(a, b)[0] for a, b in zip(*_seen(data, left, right), strict=True)]
    return max(found), 0.87 * math.sqrt(1 / len(left) + 1 / len(right))  # mean of the KS law


def kolmogorov(left: Tensor, right: Tensor) -> tuple[float, float]:  # (n,), (m,)
    """The two-sample statistic, and its p-value by Kolmogorov's limit law."""
    both = torch.cat((left, right)).sort().values
    levels = [
        torch.searchsorted(one.sort().values, both, right=True).double() / len(one)
        for one in (left, right)
    ]
    gap = float((levels[0] - levels[1]).abs().max())
    return gap, kolmogorov_p_value(gap / math.sqrt(1 / len(left) + 1 / len(right)))


def kolmogorov_p_value(statistic: float) -> float:
    """Chance that a Brownian bridge goes further than `statistic`."""
    if statistic < 0.3:
        return 1.0
    signs = (1.0 if k % 2 else -1.0 for k in range(1, 40))
    terms = (2 * sign * math.exp(-2 * (k * statistic) ** 2) for k, sign in enumerate(signs, 1))
    return min(1.0, max(0.0, sum(terms)))


def increments(setting: Setting, states: Tensor) -> float:  # (B, N + 1, d)
    """The noise in every step of chains, by the target's own mean, is fresh and standard normal.

    Its mean and variance, in all directions and in the one in which predictions turn (where
    couplings act), correlation of neighbouring steps, and its distribution function.
    """
    kernel, states = setting.kernel, states.double()
    random = [step for step, draws in enumerate(kernel.is_random) if draws]
    steps = torch.tensor(random).expand(len(states), -1)  # (B, M)
    rows = torch.arange(len(states))[:, None].expand_as(steps)
    here, after = states[:, random], states[:, [step + 1 for step in random]]
    seen = setting.denoiser.predict(here.flatten(0, 1), steps.flatten(), rows.flatten())
    clean = seen.clean.view_as(here)
    noise = (after - kernel.mean(here, clean, steps)) / kernel.deviation(steps, here)
    turn = clean[:, 1:] - clean[:, :-1]
    along = (noise[:, 1:] * turn).sum(-1) / turn.norm(dim=-1).clamp_min(1e-12)
    neighbours = (noise[:, 1:] * noise[:, :-1]).sum(-1)
    scores = (
        along.sum() / along.numel() ** 0.5,
        (along**2 - 1).sum() / (2 * along.numel()) ** 0.5,
        noise.sum() / noise.numel() ** 0.5,
        (noise**2 - 1).sum() / (2 * noise.numel()) ** 0.5,
        neighbours.sum() / (neighbours.numel() * noise.shape[-1]) ** 0.5,
        (along[:, 1:] * along[:, :-1]).sum() / along[:, 1:].numel() ** 0.5,
    )
    levels = torch.special.ndtr(noise.flatten().sort().values)
    grid = torch.arange(1, len(levels) + 1) / len(levels)
    gap = float(torch.maximum(grid - levels, levels - grid + 1 / len(levels)).max())
    shape = kolmogorov_p_value(gap * len(levels) ** 0.5)
    return min(1.0, 2 * min(normal_p_value(torch.stack(scores)), shape))


def normal_p_value(scores: Tensor) -> float:  # (k,)
    """Chance that the largest of k standard normal scores is as large, either way; a bound."""
    return min(1.0, len(scores) * math.erfc(float(scores.abs().max()) / math.sqrt(2)))


def _monomials(x: Tensor) -> Tensor:  # (n, d) -> (n, d + d (d + 1) / 2)
    row, column = torch.triu_indices(x.shape[1], x.shape[1])
    return torch.cat((x, x[:, row] * x[:, column]), 1)


def _cell(data: Mixture, x: Tensor) -> Tensor:  # (n, d) -> (n,)
    which = data.component(x)
    away = x.double() - data.means[which] > 0
    return 4 * which + 2 * away[:, 0].long() + away[:, 1].long()


def _seen(data: Mixture, left: Tensor, right: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What is compared of two samples: numbers, one tensor (n,) each."""
    d = left.shape[1]
    draw = torch.Generator().manual_seed(0)
    lines = torch.cat((torch.eye(d), torch.randn(DIRECTIONS, d, generator=draw))).double()
    first, second = (
        [*(x.double() @ lines.T).unbind(1), data.log_density(x)] for x in (left, right)
    )
    return first, second
