"""The training loop: all that learns, learns here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mmspec.training.reporting import Report, silent

T = TypeVar("T")
_MUON = 13.0  # rate of Muon over the rate of AdamW
_NARROWEST = 6  # a weight with fewer rows or columns is a table, say of scales or of heads


@dataclass(frozen=True)
class Course:
    """How all that a checkpoint learns is learnt: from a seed, as planned or in a short trial."""

    seed: int = 0
    steps: int | None = None  # of each stage at most; None = as planned
    progress: Report = silent

    def cut(self, planned: int, each: int = 1) -> int:
        """As many as planned, in a trial at most `each` for every step."""
        return planned if self.steps is None else min(planned, each * self.steps)

    def later(self, by: int) -> Course:
        """The same from another seed."""
        return replace(self, seed=self.seed + by)


@dataclass(frozen=True)
class Fall:
    """So many steps in which the rate falls from here."""

    steps: int
    rate: float


def fit(
    parameters: Sequence[nn.Parameter],
    items: Iterator[T],
    loss_of: Callable[[T], Tensor],
    fall: Fall,
    stage: str,
    course: Course,
    matrices: Sequence[nn.Parameter] = (),
    *,
    floor: float = 0.01,
    warm: int | None = None,
    betas: tuple[float, float] = (0.9, 0.98),
    clip: float = 1.0,
) -> None:
    """A warm-up of `warm` steps, then a cosine fall to `floor`; AdamW, but Muon for `matrices`.

    Deep narrow models learn in about half the steps when the updates of their weight matrices are
    orthogonal (Jordan et al. 2024). The warm-up is a tenth of the steps, at most 100, if not said.
    """
    steps, rate, progress = course.cut(fall.steps), fall.rate, course.progress
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(parameters, lr=rate, betas=betas, weight_decay=0.01)
    ]
    if matrices:
        optimisers.append(torch.optim.Muon(matrices, lr=_MUON * rate, weight_decay=0.01))
    warm = min(100, max(1, steps // 10)) if warm is None else warm

    def share(step: int) -> float:
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / warm) * (floor + (1 - floor) * fall)

    schedules = [torch.optim.lr_scheduler.LambdaLR(one, share) for one in optimisers]
    learnt = [*parameters, *matrices]
    for step in range(steps):
        loss = loss_of(next(items))
        for optimiser in optimisers:
            optimiser.zero_grad()
        torch.autograd.backward(loss, inputs=learnt)  # nothing gathers on what is only read
        nn.utils.clip_grad_norm_(learnt, clip)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
        progress(stage, step + 1, steps, float(loss.detach()))


def divided(
    layers: nn.Module, parameters: Iterable[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weight matrices of `layers`, and what else of `parameters` there is."""
    matrices = [p for p in layers.parameters() if p.dim() == 2 and min(p.shape) > _NARROWEST]
    chosen = set(map(id, matrices))
    return matrices, [p for p in parameters if id(p) not in chosen]


def shuffled(count: int, batch: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Numbers below `count` in batches without end, all of them before any comes again."""
    while True:
        yield from generator.permutation(count).reshape(-1, batch)


def chunks(
    items: Sequence[T], size: int, stage: str = "", progress: Report = silent
) -> Iterator[Sequence[T]]:
    """Items in turns of `size`; each turn is reported once it was worked on."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
        progress(stage, min(len(items), start + size), len(items), 0.0)
