"""Statistical tests of chains of a mixture: two-sample tests, and tests of the noise in each step.

Functions return p-values. Several statistics in one test are combined by Bonferroni correction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmspec.bench.frequency import MIN_EXPECTED, p_value
from mmspec.bench.gaussian_tests import kolmogorov, kolmogorov_p_value, normal_p_value
from mmspec.modalities.diffusion.mixture import Mixture
from mmspec.modalities.diffusion.tiny_models import ChainSetting

DIRECTIONS = 4  # random directions in addition to the axes


def cell_p_value(data: Mixture, left: Tensor, right: Tensor) -> float:  # (n, d), (m, d)
    """Chi-square test of two samples over cells: component, and quadrant around its mean."""
    counts = [
        torch.bincount(_cell(data, one), minlength=4 * len(data.weights)).double()
        for one in (left, right)
    ]
    rare = counts[0] + counts[1] < 2 * MIN_EXPECTED
    counts = [torch.cat((c[~rare], c[rare].sum()[None])) for c in counts]
    both = counts[0] + counts[1]
    counts, both = [c[both > 0] for c in counts], both[both > 0]
    scale = math.sqrt(len(right) / len(left))
    statistic = (counts[0] * scale - counts[1] / scale).square() / both
    return p_value(float(statistic.sum()), len(both) - 1)


def projection_p_value(data: Mixture, left: Tensor, right: Tensor) -> float:  # (n, d), (m, d)
    """KS tests of two samples along the axes, random directions, and of the log density."""
    found = [kolmogorov(a, b) for a, b in zip(*_project(data, left, right), strict=True)]
    return min(1.0, len(found) * min(p for _, p in found))


def projection_distance(data: Mixture, left: Tensor, right: Tensor) -> tuple[float, float]:
    """Largest KS distance over those projections, and the mean distance expected by chance.

    The latter is for one projection; the largest of several is somewhat larger.
    """
    found = [kolmogorov(a, b)[0] for a, b in zip(*_project(data, left, right), strict=True)]
    return max(found), 0.87 * math.sqrt(
        1 / len(left) + 1 / len(right)
    )  # mean of the KS distribution


def increment_p_value(setting: ChainSetting, states: Tensor) -> float:  # (B, N + 1, d)
    """Test that the noise of every step, given the target's mean, is independent standard normal.

    Tests mean and variance, over all directions and along the change of the prediction (where
    couplings act), the correlation of adjacent steps, and the distribution function.
    """
    kernel, states = setting.kernel, states.double()
    random = [step for step, draws in enumerate(kernel.is_random) if draws]
    steps = torch.tensor(random).expand(len(states), -1)  # (B, M)
    rows = torch.arange(len(states))[:, None].expand_as(steps)
    here, after = states[:, random], states[:, [step + 1 for step in random]]
    prediction = setting.denoiser.predict(here.flatten(0, 1), steps.flatten(), rows.flatten())
    clean = prediction.clean.view_as(here)
    noise = (after - kernel.mean(here, clean, steps)) / kernel.std_at(steps, here)
    change = clean[:, 1:] - clean[:, :-1]
    along = (noise[:, 1:] * change).sum(-1) / change.norm(dim=-1).clamp_min(1e-12)
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
    component = data.component(x)
    away = x.double() - data.means[component] > 0
    return 4 * component + 2 * away[:, 0].long() + away[:, 1].long()


def _project(data: Mixture, left: Tensor, right: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Scalar projections of two samples, one tensor (n,) each."""
    d = left.shape[1]
    generator = torch.Generator().manual_seed(0)
    lines = torch.cat((torch.eye(d), torch.randn(DIRECTIONS, d, generator=generator))).double()
    first, second = (
        [*(x.double() @ lines.T).unbind(1), data.log_density(x)] for x in (left, right)
    )
    return first, second
