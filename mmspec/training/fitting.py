"""The training loop: all that learns, learns here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mmspec.training.reporting import Report, silent

T = TypeVar("T")
_MUON = 13.0  # rate of Muon over the rate of AdamW
_NARROWEST = 6  # a weight with fewer rows or columns is a table, say of scales or of heads


# of gradients in place, and of the loss
Gathered = Callable[[Sequence[nn.Parameter], float], float]


def _alone(learnt: Sequence[nn.Parameter], loss: float) -> float:
    return loss


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
    **settings: Any,
) -> None:
    """Follow the loss of one item a step, as `Descent` does with these `settings`."""
    steps, progress = course.cut(fall.steps), course.progress
    descent = Descent(parameters, Fall(steps, fall.rate), matrices, **settings)
    for step in range(steps):
        loss = descent.step([lambda: loss_of(next(items))])
        progress(stage, step + 1, steps, loss)


class Descent:
    """A warm-up of `warm` steps, then a cosine fall to `floor`; AdamW, but Muon for `matrices`.

    Deep narrow models learn in about half the steps when the updates of their weight matrices are
    orthogonal (Jordan et al. 2024). The warm-up is a tenth of the steps, at most 100, if not said.
    The rate depends on the number of the step alone, so a descent goes on where `state` was noted.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        fall: Fall,
        matrices: Sequence[nn.Parameter] = (),
        *,
        floor: float = 0.01,
        warm: int | None = None,
        betas: tuple[float, float] = (0.9, 0.98),
        clip: float = 1.0,
    ) -> None:
        self.fall, self.floor, self.clip = fall, floor, clip
        self.warm = min(100, max(1, fall.steps // 10)) if warm is None else warm
        self.learnt = [*parameters, *matrices]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(parameters, lr=fall.rate, betas=betas, weight_decay=0.01)
        ]
        if matrices:
            rate = _MUON * fall.rate
            self.optimisers.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.01))
        self.highest = [one.param_groups[0]["lr"] for one in self.optimisers]
        self.taken = 0  # steps so far

    def share(self, step: int) -> float:
        """Of the highest rate, in this step."""
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.fall.steps)))
        return min(1.0, (step + 1) / self.warm) * (self.floor + (1 - self.floor) * fall)

    def step(self, losses: Sequence[Callable[[], Tensor]], gathered: Gathered = _alone) -> float:
        """One update by the mean of losses (), each computed and forgotten in turn; their mean.

        `gathered` brings in the gradients of others that take the same steps.
        """
        with _tiny_is_nothing():
            return self._stepped(losses, gathered)

    def _stepped(self, losses: Sequence[Callable[[], Tensor]], gathered: Gathered) -> float:
        total = 0.0
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        for make in losses:
            loss = make() / len(losses)
            torch.autograd.backward(loss, inputs=self.learnt)  # what is only read gathers nothing
            total += float(loss.detach())
        total = gathered(self.learnt, total)
        nn.utils.clip_grad_norm_(self.learnt, self.clip)
        for optimiser, highest in zip(self.optimisers, self.highest, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = highest * self.share(self.taken)
            optimiser.step()
        self.taken += 1
        return total


@contextmanager
def _tiny_is_nothing() -> Iterator[None]:
    """Take numbers below 1e-38 for zero.

    The tails of sharp attention are such numbers, and a processor computes with them many times
    slower than with others: steps of a model that has learnt to look took up to three times as long
    as its first ones.
    """
    was = bool(torch.tensor(1e-39).mul(1.0) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was)


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
