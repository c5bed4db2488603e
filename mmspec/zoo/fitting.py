"""The training loop of the text-to-image parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from mmspec.zoo.learning import Progress

T = TypeVar("T")
_MUON = 13.0  # rate of Muon over the rate of AdamW


def fit(
    parameters: Sequence[nn.Parameter],
    items: Iterator[T],
    loss_of: Callable[[T], Tensor],
    steps: int,
    rate: float,
    stage: str,
    progress: Progress,
    matrices: Sequence[nn.Parameter] = (),
) -> None:
    """A short warm-up, then a cosine fall to a hundredth; AdamW, but Muon for `matrices`.

    Deep narrow models learn in about half the steps when the updates of their weight matrices are
    orthogonal (Jordan et al. 2024).
    """
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    ]
    if matrices:
        optimisers.append(torch.optim.Muon(matrices, lr=_MUON * rate, weight_decay=0.01))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimiser, lambda i: _share(i, steps))
        for optimiser in optimisers
    ]
    learnt = [*parameters, *matrices]
    for step in range(steps):
        loss = loss_of(next(items))
        for optimiser in optimisers:
            optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(learnt, 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
        progress(stage, step + 1, steps, float(loss.detach()))


def _share(step: int, steps: int) -> float:
    warm = min(100, max(1, steps // 10))
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    return min(1.0, (step + 1) / warm) * (0.01 + 0.99 * fall)
