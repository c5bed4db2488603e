"""Drafting with extrapolated predictions: a frozen draft with a correction.

    step             3    4    5    6    7
    predicted        c3   c4   .    .    .      at committed states, in any earlier round
    drafted with          c5' = c4 + (c4 - c3), c6' = c4 + 2 (c4 - c3), ...     order 1, in steps

De Bortoli et al. 2025 draft with the frozen output; any forecast from committed states is exact
too. (An Adams-Bashforth step integrates the same polynomial; the target takes Euler steps, so the
value at their left end is forecast.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.draft import Draft, Drafter, Round, Scores
from mmspec.drafters.denoising.frozen import (
    PredictionDrafter,
    next_distribution,
    prediction_options,
)
from mmspec.drafters.denoising.unroll import unroll
from mmspec.drafters.denoising.window import Progress, window_of
from mmspec.drafters.forecast.forecast import HIGHEST_ORDER
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.targets.continuous.denoising import Trajectory


def newton_weights(known_steps: Sequence[float], at: float) -> list[float]:
    """Weights of the values at the known steps in their interpolation polynomial at `at`."""
    return [
        math.prod((at - other) / (place - other) for other in known_steps if other != place)
        for place in known_steps
    ]


@dataclass
class History:
    """Frozen quantities at the last committed states, newest last, and the window's progress."""

    progress: Progress
    memory: Tensor  # (B, order + 1, *E)
    steps: list[list[int]]  # per row, at most order + 1, ascending


@dataclass(frozen=True)
class Extrapolated(PredictionDrafter):
    """Like `Frozen`, but the frozen quantity is extrapolated over the steps.

    By the polynomial through the last `order` + 1 known steps, or fewer where there are fewer.
    Order 0 is `Frozen`. Exact with any exact verifier. An ideal denoiser's clean sample is a
    martingale along a random chain, which no extrapolation improves on; that of a real network, and
    other quantities (`Velocity`), may drift.
    """

    order: int = 1

    def __post_init__(self) -> None:
        check_number("order", self.order, 0, HIGHEST_ORDER, whole=True)

    def begin(self, context: Trajectory) -> History:
        size = (context.batch, self.order + 1, *context.event)
        memory = torch.zeros(size, dtype=context.state.dtype, device=context.device)
        return History(self.window.begin(context), memory, [[] for _ in range(context.batch)])

    def propose(self, context: Trajectory, state: History) -> Draft:
        levels = self.levels(context, state.progress)
        tree = self.window.topology(max(levels))
        if not tree.nodes:
            return context.empty_draft()
        memory, steps = self._append_current(context, state)
        weights = self._weights(context, steps, tree.depth).to(memory)  # (B, depth, H)

        def distribution(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            guess = torch.einsum("bh,bh...->b...", weights[:, depth], memory)[:, None]
            mean = self.freeze.mean(context.kernel, guess, x, step)
            return next_distribution(context, depth, x, step, mean)

        return unroll(context, tree, levels, distribution, self.kind)

    def observe(
        self, context: Trajectory, state: History, draft: Draft, scores: Scores, round_: Round
    ) -> History:
        progress = self.window.observe(state.progress, context, draft, scores, round_)
        size = state.memory.shape[1]
        indices, steps = [], []
        for row, path in enumerate(round_.path):
            tokens = round_.tokens[row]
            first = context.step[row] - len(tokens)
            new = [size, *(size + 1 + node for node in path)][: len(tokens)]
            indices.append([*range(size), *new][-size:])
            steps.append([*state.steps[row], *range(first, first + len(new))][-size:])
        index = torch.tensor(indices, device=context.device)
        rows = torch.arange(draft.batch, device=context.device)[:, None]
        known_steps = self.freeze.freeze(
            context.kernel,
            scores.features["state"],
            scores.features["clean"],
            (scores.position - 1).clamp_max(context.kernel.num_steps - 1),
        )
        memory = torch.cat((state.memory, known_steps), 1)[rows, index]
        return History(progress, memory, steps)

    def _append_current(
        self, context: Trajectory, state: History
    ) -> tuple[Tensor, list[list[int]]]:  # (B, H, *E)
        """The history, with the prediction at the current state appended where `look` made one."""
        known = context.known
        if not any(known.fresh):
            return state.memory, state.steps
        at = torch.tensor(known.step, device=context.device)
        current = self.freeze.freeze(context.kernel, known.state, known.prediction.clean, at)[
            :, None
        ]
        fresh = torch.tensor(known.fresh, device=current.device).reshape(
            -1, *(1,) * (current.dim() - 1)
        )
        memory = torch.where(fresh, torch.cat((state.memory, current), 1)[:, 1:], state.memory)
        size = memory.shape[1]
        pairs = zip(state.steps, known.step, known.fresh, strict=True)
        return memory, [[*old, step][-size:] if new else old for old, step, new in pairs]

    def _weights(self, context: Trajectory, steps: list[list[int]], depth: int) -> Tensor:
        """Weights (B, depth, H) float64 of the known values, for every drafted step."""
        last, size = context.kernel.num_steps - 1, self.order + 1
        table = []
        for first, known_steps in zip(context.step, steps, strict=True):
            pad = [0.0] * (size - len(known_steps))
            ahead = [min(first + k, last) for k in range(depth)]
            table.append([pad + newton_weights(known_steps, at) for at in ahead])
        return torch.tensor(table, dtype=torch.float64)


def extrapolated_prediction(kit: Kit) -> Drafter:
    """The target's last predictions, extrapolated."""
    return Extrapolated(window_of(kit), *prediction_options(kit), kit.options["order"])
