"""The training loop, and what all trainers share: the run, its learning rates and its progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

T = TypeVar("T")
_MUON = 13.0  # learning rate of Muon over that of AdamW
_MIN_MUON_SIZE = 6  # weights with a smaller dimension (tables of scales, of heads) get AdamW

TrainingProgress = Callable[[str, int, int, float], None]  # (stage, step, steps, loss)
# averages gradients over processes in place; returns the mean loss
GradientReduction = Callable[[Sequence[nn.Parameter], float], float]


def silent(stage: str, step: int, steps: int, loss: float) -> None:
    """Report nothing."""


def _keep_gradients(trainable: Sequence[nn.Parameter], loss: float) -> float:
    return loss


@dataclass(frozen=True)
class TrainingRun:
    """Settings of one training: its seed, a limit of steps for short trials, and its progress."""

    seed: int = 0
    steps: int | None = None  # limit of each stage; None = as planned
    progress: TrainingProgress = silent

    def limit_steps(self, planned: int, each: int = 1) -> int:
        """`planned`, in a short trial at most `each` times the limit of steps."""
        return planned if self.steps is None else min(planned, each * self.steps)

    def with_seed_offset(self, by: int) -> TrainingRun:
        """The same run with another seed."""
        return replace(self, seed=self.seed + by)


@dataclass(frozen=True)
class CosineDecay:
    """A number of steps, and the peak learning rate that decays over them."""

    steps: int
    rate: float


def fit(
    parameters: Sequence[nn.Parameter],
    items: Iterator[T],
    loss_of: Callable[[T], Tensor],
    decay: CosineDecay,
    stage: str,
    run: TrainingRun,
    matrices: Sequence[nn.Parameter] = (),
    **settings: Any,
) -> None:
    """Minimise the loss of one item per step; `settings` are those of `ScheduledOptimizer`."""
    steps, progress = run.limit_steps(decay.steps), run.progress
    optimizer = ScheduledOptimizer(parameters, CosineDecay(steps, decay.rate), matrices, **settings)
    for step in range(steps):
        loss = optimizer.step([lambda: loss_of(next(items))])
        progress(stage, step + 1, steps, loss)


class ScheduledOptimizer:
    """AdamW, and Muon for `matrices`, with linear warm-up and cosine decay to `floor`.

    Deep narrow models train in about half the steps when the updates of their weight matrices are
    orthogonal (Jordan et al. 2024). Default warm-up: a tenth of the steps, at most 100. The rate
    depends on the step number alone, so training resumes from a saved `state`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        decay: CosineDecay,
        matrices: Sequence[nn.Parameter] = (),
        *,
        floor: float = 0.01,
        warmup_steps: int | None = None,
        betas: tuple[float, float] = (0.9, 0.98),
        clip: float = 1.0,
    ) -> None:
        self.decay, self.floor, self.clip = decay, floor, clip
        self.warmup = min(100, max(1, decay.steps // 10)) if warmup_steps is None else warmup_steps
        self.trainable = [*parameters, *matrices]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(parameters, lr=decay.rate, betas=betas, weight_decay=0.01)
        ]
        if matrices:
            rate = _MUON * decay.rate
            self.optimisers.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.01))
        self.peak_rates = [one.param_groups[0]["lr"] for one in self.optimisers]
        self.num_steps_done = 0

    def rate_factor(self, step: int) -> float:
        """Learning rate of a step over the peak rate."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.decay.steps)))
        return min(1.0, (step + 1) / self.warmup) * (self.floor + (1 - self.floor) * cosine)

    def step(
        self,
        losses: Sequence[Callable[[], Tensor]],
        reduce_gradients: GradientReduction = _keep_gradients,
    ) -> float:
        """Update once by the mean of losses (), computed one after the other; return that mean.

        `reduce_gradients` averages over the processes that take the same steps.
        """
        total = 0.0
        with _flush_denormals():
            for optimiser in self.optimisers:
                optimiser.zero_grad()
            for make in losses:
                loss = make() / len(losses)
                torch.autograd.backward(loss, inputs=self.trainable)  # none for frozen weights
                total += float(loss.detach())
            total = reduce_gradients(self.trainable, total)
            nn.utils.clip_grad_norm_(self.trainable, self.clip)
            for optimiser, peak in zip(self.optimisers, self.peak_rates, strict=True):
                for group in optimiser.param_groups:
                    group["lr"] = peak * self.rate_factor(self.num_steps_done)
                optimiser.step()
        self.num_steps_done += 1
        return total


@contextmanager
def _flush_denormals() -> Iterator[None]:
    """Treat numbers below 1e-38 as zero.

    The tails of sharp attention are denormal numbers, with which processors compute many times
    slower: steps of a trained model took up to three times as long as its first ones.
    """
    was = bool(torch.tensor(1e-39).mul(1.0) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was)


def split_parameters(
    layers: nn.Module, parameters: Iterable[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split `parameters` into the weight matrices of `layers` and all others."""
    matrices = [p for p in layers.parameters() if p.dim() == 2 and min(p.shape) > _MIN_MUON_SIZE]
    matrix_ids = set(map(id, matrices))
    return matrices, [p for p in parameters if id(p) not in matrix_ids]


def shuffle_batches(count: int, batch: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield index batches below `count` without end, each index once per epoch."""
    while True:
        yield from generator.permutation(count).reshape(-1, batch)


def iterate_chunks(
    items: Sequence[T], size: int, stage: str = "", progress: TrainingProgress = silent
) -> Iterator[Sequence[T]]:
    """Yield chunks of `size` items; report each one after it was processed."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
        progress(stage, min(len(items), start + size), len(items), 0.0)
