"""Images of continuous tokens with a closed-form distribution, sampled by a recipe.

Diffusion heads and their conditions are linear here, so an image is one Gaussian vector. The
normalised innovations of the cells are then independent standard normals if and only if the images
have the target's distribution.
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
from mmspec.drafters.plain import NoDraft
from mmspec.targets.continuous.denoising import Prediction
from mmspec.targets.continuous.patches import (
    CellQuery,
    PatchRequest,
    PatchSettings,
    PatchTarget,
    draw_order,
    place,
)
from mmspec.targets.continuous.paths import PathDistribution
from mmspec.targets.stop import Stop
from mmspec.verifiers.path_ratio import PathRatio

CPU = torch.device("cpu")
PLAN = PatchSettings(steps=3)  # 4 cells: one, one, two


@dataclass(frozen=True)
class LinearHead:
    """Clean sample = condition + slope x state, so that paths are Gaussian vectors.

    `spread` (T,) are factors of the kernel's std.
    """

    kernel: GaussianKernel
    slope: float = 0.0
    spread: tuple[float, ...] = ()
    event: torch.Size = torch.Size([1])  # noqa: RUF009

    @classmethod
    def of(cls, std: tuple[float, ...], slope: float = 0.0, spread: Any = ()) -> LinearHead:
        """A head whose states are halved in every step."""
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
        for index in range(self.kernel.num_steps):
            a, b, s = (float(t[index]) for t in (self.kernel.state, self.kernel.clean, self._std))
            mean = (a + b * self.slope) * mean + b * condition
            variance = (a + b * self.slope) ** 2 * variance + s**2
        return mean, variance

    @property
    def _std(self) -> Tensor:
        factor = torch.tensor(self.spread or (1.0,) * self.kernel.num_steps, dtype=torch.float64)
        return self.kernel.std * factor


@dataclass(frozen=True)
class LinearReader:
    """Conditions are `bias` + `weight` x the sum of the visible cells, so images are Gaussian."""

    head: LinearHead
    bias: float = 0.0
    weight: float = 0.5
    cells: int = 4

    def distribution(self, query: CellQuery) -> PathDistribution:
        condition = self.condition(query.latents[..., 0], query.visible)[:, None]
        condition = condition.expand_as(query.cells)
        ones = torch.ones_like(condition)
        return PathDistribution(self.head, condition[..., None, None], ones, query.real)

    def condition(self, latents: Tensor, shown: Tensor) -> Tensor:  # (R, L) x2 -> (R,)
        return self.bias + self.weight * (latents * shown).sum(-1)


@dataclass(frozen=True)
class SampledImages:
    """Images, and the rounds that generated them."""

    latents: Tensor  # (B, L) float64
    turns: Tensor  # (B, L) cells in generation order
    rounds: Sequence[Round]


def sample_images(
    target: LinearReader,
    parts: Parts,
    rows: Sequence[int],
    seed: int = 0,
    plan: PatchSettings = PLAN,
) -> SampledImages:
    """Images of the rows with these ids, sampled by the decoding loop."""
    batch = len(rows)
    noise = KeyedNoise.from_seed(seed, batch, CPU, rows)
    rounds = list(decode(parts, PatchRequest(plan, batch, noise)))
    turns, spans = draw_order(noise, target.cells), plan.spans(target.cells)
    latents = torch.zeros(batch, target.cells, 1)
    for row in range(batch):
        place(latents[row], turns[row], spans, [one for new in rounds for one in new.tokens[row]])
    return SampledImages(latents[..., 0].double(), turns, rounds)


def innovations(
    target: LinearReader, images: SampledImages, plan: PatchSettings = PLAN
) -> Tensor:  # (B, L), in generation order
    """Innovation of each cell in standard deviations: iid N(0, 1) if the recipe is exact."""
    latents, turns = images.latents, images.turns
    ranks, found = turns.argsort(-1), list[Tensor]()
    for begin, end in plan.spans(target.cells):
        mean, variance = target.head.moments(target.condition(latents, ranks < begin))
        for rank in range(begin, end):
            cell = latents.gather(1, turns[:, rank : rank + 1])[:, 0]
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
    """Plain sampling of the toy: the loop without a drafter."""
    return Parts(PatchTarget(TARGET), NoDraft(), PathRatio(), Stop(PLAN.steps))
