"""Pictures of continuous tokens with a distribution in closed form, sampled by a recipe.

Diffusion heads are linear here, and so is what they are told of the cells that are shown: a whole
picture is one Gaussian vector. What each cell adds to what was known is then a standard normal,
independent of everything before, if and only if the pictures have the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.decode import Parts, decode
from mmspec.distributions.kernels import GaussianKernel
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Round
from mmspec.drafters.plain import Silent
from mmspec.targets.continuous.denoising import Prediction
from mmspec.targets.continuous.patches import (
    CellQuery,
    PatchRequest,
    PatchSettings,
    PatchTarget,
    order,
    place,
)
from mmspec.targets.continuous.paths import PathDistribution
from mmspec.targets.stop import Stop
from mmspec.verifiers.path_ratio import PathRatio

CPU = torch.device("cpu")
PLAN = PatchSettings(steps=3)  # 4 cells: one, one, two


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

    def distribution(self, asked: CellQuery) -> PathDistribution:
        condition = self.condition(asked.latents[..., 0], asked.shown)[:, None]
        condition = condition.expand_as(asked.cells)
        ones = torch.ones_like(condition)
        return PathDistribution(self.head, condition[..., None, None], ones, asked.real)

    def condition(self, latents: Tensor, shown: Tensor) -> Tensor:  # (R, L) x2 -> (R,)
        return self.bias + self.weight * (latents * shown).sum(-1)


@dataclass(frozen=True)
class SampledPictures:
    """Pictures and how they came about."""

    latents: Tensor  # (B, L) float64
    turns: Tensor  # (B, L) cells in the order of their turn
    rounds: Sequence[Round]


def draw(
    target: LinearReader,
    parts: Parts,
    rows: Sequence[int],
    seed: int = 0,
    plan: PatchSettings = PLAN,
) -> SampledPictures:
    """Pictures of the rows with these ids, through the whole loop."""
    batch = len(rows)
    noise = KeyedNoise.seeded(seed, batch, CPU, rows)
    rounds = list(decode(parts, PatchRequest(plan, batch, noise)))
    turns, spans = order(noise, target.cells), plan.spans(target.cells)
    latents = torch.zeros(batch, target.cells, 1)
    for row in range(batch):
        place(latents[row], turns[row], spans, [one for kept in rounds for one in kept.tokens[row]])
    return SampledPictures(latents[..., 0].double(), turns, rounds)


def innovations(
    target: LinearReader, drawn: SampledPictures, plan: PatchSettings = PLAN
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


_STD = (0.5, 0.4, 0.3)
TARGET = LinearReader(LinearHead.of(_STD, slope=0.3))
DRAFTS = {
    "other means": LinearReader(TARGET.head, bias=0.5, weight=0.2),
    "other spreads": LinearReader(LinearHead.of(_STD, slope=0.3, spread=(1.3, 0.8, 1.2))),
    "both": LinearReader(LinearHead.of(_STD, slope=0.0, spread=(0.8, 1.1, 0.9)), bias=0.3),
}


def plain_parts() -> Parts:
    """Plain sampling of the toy, by the loop without a drafter."""
    return Parts(PatchTarget(TARGET), Silent(), PathRatio(), Stop(PLAN.steps))
