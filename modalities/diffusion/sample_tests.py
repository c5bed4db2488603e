"""Tests of chains of a mixture: samples against samples, and the noise in every step.

Every function gives a p-value: the chance of something as odd, were the distribution right. Several
numbers looked at together count as one test (Bonferroni).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmspec.bench.frequency import LEAST, p_value
from mmspec.bench.gaussian_tests import kolmogorov, kolmogorov_p_value, normal_p_value
from mmspec.modalities.diffusion.mixture import Mixture
from mmspec.modalities.diffusion.toys import ChainSetting

DIRECTIONS = 4  # random ones, besides the axes


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
    return max(found), 0.87 * math.sqrt(
        1 / len(left) + 1 / len(right)
    )  # mean of the KS distribution


def increments(setting: ChainSetting, states: Tensor) -> float:  # (B, N + 1, d)
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
