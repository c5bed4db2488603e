"""Drafting with predictions continued from the last few: a frozen draft and a correction.

    step             3    4    5    6    7
    seen             c3   c4   .    .    .      at committed states, whichever round they fell in
    drafted with          c5' = c4 + (c4 - c3), c6' = c4 + 2 (c4 - c3), ...     order 1, in steps

De Bortoli et al. 2025 draft with the frozen output; any forecast made of committed states is exact
too. (An Adams-Bashforth step integrates the same polynomial; the target takes Euler steps, so its
value at their left end is the one to guess.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.draft import Draft, Drafter, Round, Scores
from mmspec.drafters.denoising.frozen import PredictionDrafter, opening, prediction_options
from mmspec.drafters.denoising.unroll import unroll
from mmspec.drafters.denoising.window import Progress, window_of
from mmspec.recipe import Kit
from mmspec.targets.continuous.denoising import Trajectory


def newton_weights(seen: Sequence[float], at: float) -> list[float]:
    """Weights of the values at `seen` in the polynomial through them, at `at`."""
    return [
        math.prod((at - other) / (place - other) for other in seen if other != place)
        for place in seen
    ]


@dataclass
class History:
    """What was seen at the last committed states, newest last, and the window's progress."""

    progress: Progress
    memory: Tensor  # (B, order + 1, *E)
    steps: list[list[int]]  # per row, at most order + 1, rising


@dataclass(frozen=True)
class Extrapolated(PredictionDrafter):
    """Like `Frozen`, but what is frozen moves on as it did over the last committed states.

    By the polynomial through the last `order` + 1 places seen, fewer where there are fewer. Order 0
    is `Frozen`. Exact with any verifier that is. An ideal denoiser's clean sample is a martingale
    along a random chain, which no extrapolation improves on; that of a real network, and other
    quantities (`Velocity`), may drift.
    """

    order: int = 1

    def __post_init__(self) -> None:
        if self.order < 0:
            raise ValueError(f"order={self.order} is below 0; give 0 (frozen), 1 or 2")

    def begin(self, context: Trajectory) -> History:
        size = (context.batch, self.order + 1, *context.event)
        memory = torch.zeros(size, dtype=context.state.dtype, device=context.device)
        return History(self.window.begin(context), memory, [[] for _ in range(context.batch)])

    def propose(self, context: Trajectory, state: History) -> Draft:
        levels = self.levels(context, state.progress)
        tree = self.window.topology(max(levels))
        if not tree.nodes:
            return context.nothing()
        memory, steps = self._with_fresh(context, state)
        weights = self._weights(context, steps, tree.depth).to(memory)  # (B, depth, H)

        def distribution(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            guess = torch.einsum("bh,bh...->b...", weights[:, depth], memory)[:, None]
            mean = self.freeze.mean(context.kernel, guess, x, step)
            return opening(context, depth, x, step, mean)

        return unroll(context, tree, levels, distribution, self.kind)

    def observe(
        self, context: Trajectory, state: History, draft: Draft, scores: Scores, kept: Round
    ) -> History:
        progress = self.window.observe(state.progress, context, draft, scores, kept)
        size = state.memory.shape[1]
        picked, steps = [], []
        for row, path in enumerate(kept.path):
            tokens = kept.tokens[row]
            begun = context.step[row] - len(tokens)
            new = [size, *(size + 1 + node for node in path)][: len(tokens)]
            picked.append([*range(size), *new][-size:])
            steps.append([*state.steps[row], *range(begun, begun + len(new))][-size:])
        index = torch.tensor(picked, device=context.device)
        rows = torch.arange(draft.batch, device=context.device)[:, None]
        seen = self.freeze.freeze(
            context.kernel,
            scores.features["state"],
            scores.features["clean"],
            (scores.position - 1).clamp_max(context.kernel.steps - 1),
        )
        memory = torch.cat((state.memory, seen), 1)[rows, index]
        return History(progress, memory, steps)

    def _with_fresh(
        self, context: Trajectory, state: History
    ) -> tuple[Tensor, list[list[int]]]:  # (B, H, *E)
        """The history, and at its end what `look` saw where the rows stand now."""
        known = context.known
        if not any(known.fresh):
            return state.memory, state.steps
        at = torch.tensor(known.step, device=context.device)
        now = self.freeze.freeze(context.kernel, known.state, known.prediction.clean, at)[:, None]
        fresh = torch.tensor(known.fresh, device=now.device).reshape(-1, *(1,) * (now.dim() - 1))
        memory = torch.where(fresh, torch.cat((state.memory, now), 1)[:, 1:], state.memory)
        size = memory.shape[1]
        pairs = zip(state.steps, known.step, known.fresh, strict=True)
        return memory, [[*old, step][-size:] if new else old for old, step, new in pairs]

    def _weights(self, context: Trajectory, steps: list[list[int]], depth: int) -> Tensor:
        """Weights (B, depth, H) float64 of what was seen, for every drafted step."""
        last, size = context.kernel.steps - 1, self.order + 1
        table = []
        for begun, seen in zip(context.step, steps, strict=True):
            pad = [0.0] * (size - len(seen))
            ahead = [min(begun + k, last) for k in range(depth)]
            table.append([pad + newton_weights(seen, at) for at in ahead])
        return torch.tensor(table, dtype=torch.float64)


def extrapolated_prediction(kit: Kit) -> Drafter:
    """The target's last predictions, continued."""
    return Extrapolated(window_of(kit), *prediction_options(kit), kit.options["order"])
