"""Pictures of continuous tokens with a law in closed form, sampled by a recipe.

Diffusion heads are linear here, and so is what they are told of the cells that are shown: a whole
picture is one Gaussian vector. What each cell adds to what was known is then a standard normal,
independent of everything before, if and only if the pictures have the target's law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.bench.gaussian_tests import kolmogorov_p_value
from mmspec.decode import Parts, decode
from mmspec.draft import Round
from mmspec.laws.kernels import GaussianKernel
from mmspec.laws.noise import KeyedNoise
from mmspec.targets.denoising import Prediction
from mmspec.targets.patches import PatchRequest, Plan, order, place
from mmspec.targets.paths import PathLaw

CPU = torch.device("cpu")
PLAN = Plan(steps=3)  # 4 cells: one, one, two


@dataclass(frozen=True)
class LinearHead:
    """Clean sample = condition + slope x state; the paths are one Gaussian vector.

    `spread` (T,) are factors of the kernel's std.
    """

    kernel: GaussianKernel
    slope: float = 0.0
    spread: tuple[float, ...] = ()
    event: torch.Size = torch.Size([1])  # noqa: RUF009

    @classmethod
    def of(cls, std: tuple[float, ...], slope: float = 0.0, spread: Any = ()) -> LinearHead:
        """States lose half of themselves in every step."""
        count = len(std)
        half = torch.full((count,), 0.5, dtype=torch.float64)
        levels = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        table = torch.tensor(std, dtype=torch.float64)
        kernel = GaussianKernel(half, half, table, levels, (1.01 - levels**2).sqrt())
        return cls(kernel, slope, tuple(spread))

    def predict(self, states: Tensor, step: Tensor, condition: Tensor, scale: Tensor) -> Prediction:
        std = None
        if self.spread:
            factor = torch.tensor(self.spread)[step][:, None]
            std = (self.kernel.std[step][:, None] * factor).float()
        return Prediction(condition[:, 0] + self.slope * states, std)

    def moments(self, condition: Tensor) -> tuple[Tensor, float]:
        """Mean and variance of the token under a condition, float64."""
        mean, variance = torch.zeros_like(condition), 1.0
        for index in range(self.kernel.steps):
            a, b, s = (float(t[index]) for t in (self.kernel.state, self.kernel.clean, self._std))
            mean = (a + b * self.slope) * mean + b * condition
            variance = (a + b * self.slope) ** 2 * variance + s**2
        return mean, variance

    @property
    def _std(self) -> Tensor:
        factor = torch.tensor(self.spread or (1.0,) * self.kernel.steps, dtype=torch.float64)
        return self.kernel.std * factor


@dataclass(frozen=True)
class LinearReader:
    """Conditions are a number plus `weight` x the sum of what is shown: pictures are Gaussian."""

    head: LinearHead
    bias: float = 0.0
    weight: float = 0.5
    cells: int = 4

    def law(
        self,
        latents: Tensor,
        shown: Tensor,
        cells: Tensor,
        real: Tensor,
        image: Tensor,
        reach: Tensor,
    ) -> PathLaw:
        condition = self.condition(latents[..., 0], shown)[:, None].expand_as(cells)
        return PathLaw(self.head, condition[..., None, None], torch.ones_like(condition), real)

    def condition(self, latents: Tensor, shown: Tensor) -> Tensor:  # (R, L) x2 -> (R,)
        return self.bias + self.weight * (latents * shown).sum(-1)


@dataclass(frozen=True)
class Drawn:
    """Pictures and how they came about."""

    latents: Tensor  # (B, L) float64
    turns: Tensor  # (B, L) cells in the order of their turn
    rounds: Sequence[Round]


def draw(
    target: LinearReader, parts: Parts, rows: Sequence[int], seed: int = 0, plan: Plan = PLAN
) -> Drawn:
    """Pictures of the rows with these ids, through the whole loop."""
    batch = len(rows)
    noise = KeyedNoise.seeded(seed, batch, CPU, rows)
    rounds = list(decode(parts, PatchRequest(plan, batch, noise)))
    turns, spans = order(noise, target.cells), plan.spans(target.cells)
    latents = torch.zeros(batch, target.cells, 1)
    for row in range(batch):
        place(latents[row], turns[row], spans, [one for kept in rounds for one in kept.tokens[row]])
    return Drawn(latents[..., 0].double(), turns, rounds)


def innovations(
    target: LinearReader, drawn: Drawn, plan: Plan = PLAN
) -> Tensor:  # (B, L), in the order of the turns
    """What each cell adds to what was known, in standard deviations: iid N(0, 1) if exact."""
    latents, turns = drawn.latents, drawn.turns
    ranks, found = turns.argsort(-1), list[Tensor]()
    for begin, end in plan.spans(target.cells):
        mean, variance = target.head.moments(target.condition(latents, ranks < begin))
        for place_ in range(begin, end):
            cell = latents.gather(1, turns[:, place_ : place_ + 1])[:, 0]
            found.append((cell - mean) / variance**0.5)
    return torch.stack(found, 1)


def p_values(found: Tensor) -> list[float]:
    """Kolmogorov-Smirnov tests against N(0, 1): of each cell, and of pairs (independence)."""
    columns = list(found.unbind(1))
    count = len(columns)
    pairs = [(i, j) for i in range(count) for j in range(i)]
    columns += [(found[:, i] + sign * found[:, j]) / 2**0.5 for i, j in pairs for sign in (1, -1)]
    return [uniform_p_value(torch.special.ndtr(column)) for column in columns]


def uniform_p_value(levels: Tensor) -> float:  # (n,)
    """Kolmogorov-Smirnov test of numbers against the uniform law on (0, 1)."""
    return kolmogorov_p_value(uniform_gap(levels) * len(levels) ** 0.5)


def uniform_gap(levels: Tensor) -> float:  # (n,)
    """The largest distance of their distribution function from the diagonal."""
    levels, count = levels.sort().values, len(levels)
    grid = torch.arange(1, count + 1) / count
    return float(torch.maximum(grid - levels, levels - grid + 1 / count).max())
