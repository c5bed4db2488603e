"""Training for a number of CPU minutes instead of steps: a busy machine changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mmspec.training.fitting import CosineDecay, ScheduledOptimizer, TrainingRun

_PARTS = 10_000  # of a stage; the learning rate is a function of them as of steps elsewhere
_POINTS = 10  # of the loss curve
_WARM = 0.03  # share of a stage


class CpuBudget:
    """CPU seconds of this process, apart from those within forwards of the target.

    All draft models learn from the same states of the target, which some read from a cache and
    others let it compute again; so they are not counted.
    """

    def __init__(self, minutes: float) -> None:
        self.seconds, self.started, self.free = 60 * minutes, time.process_time(), 0.0

    def used(self) -> float:
        """Seconds so far."""
        return time.process_time() - self.started - self.free

    def share(self) -> float:
        """Share that is used, at most 1."""
        return min(1.0, self.used() / self.seconds)

    @contextmanager
    def without(self, model: nn.Module) -> Iterator[None]:
        """Do not count what forwards of `model` take."""
        entered: list[float] = []

        def enter(*_: Any) -> None:
            entered.append(time.process_time())

        def leave(*_: Any) -> None:
            since = entered.pop()
            self.free += 0.0 if entered else time.process_time() - since

        hooks = [
            model.register_forward_pre_hook(enter),
            model.register_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@dataclass
class LossCurve:
    """Mean loss in each tenth of a budget."""

    sums: list[float] = field(default_factory=lambda: [0.0] * _POINTS)
    counts: list[int] = field(default_factory=lambda: [0] * _POINTS)

    def add(self, share: float, loss: float) -> None:
        at = min(int(share * _POINTS), _POINTS - 1)
        self.sums[at] += loss
        self.counts[at] += 1

    def points(self) -> list[float | None]:
        """None where no step fell into a tenth."""
        pairs = zip(self.sums, self.counts, strict=True)
        return [round(total / count, 4) if count else None for total, count in pairs]


def fit_until(
    stop: float,
    budget: CpuBudget,
    curve: LossCurve,
    loss_of: Callable[[float], Tensor],
    parameters: tuple[Sequence[nn.Parameter], Sequence[nn.Parameter]],
    rate: float,
    stage: str,
    run: TrainingRun,
) -> int:
    """Minimise a loss until the share `stop` of the budget is used; returns the steps.

    `loss_of` gets the share of this stage that is done. `parameters` are the weight matrices, for
    Muon, and all others. The rate decays over the stage. `run` limits the steps of a short trial.
    """
    matrices, others = parameters
    start, steps = budget.share(), 0
    decay = CosineDecay(_PARTS, rate)
    optimizer = ScheduledOptimizer(others, decay, matrices, warmup_steps=int(_WARM * _PARTS))
    while (share := budget.share()) < stop and steps < run.limit_steps(steps + 1):
        done = min(1.0, (share - start) / max(stop - start, 1e-9))
        optimizer.num_steps_done = int(done * _PARTS)

        def make_loss(done: float = done) -> Tensor:
            return loss_of(done)

        loss = optimizer.step([make_loss])
        curve.add(share, loss)
        steps += 1
        run.progress(stage, int(_PARTS * budget.share()), _PARTS, loss)
    return steps
