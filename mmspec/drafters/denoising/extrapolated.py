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
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.denoising.freeze import Clean, Freeze, freeze_named
from mmspec.drafters.denoising.frozen import Refresh, Root, opening, root_named, seen_levels
from mmspec.drafters.denoising.unroll import kinds, unroll
from mmspec.drafters.denoising.window import Progress, Window, window_of
from mmspec.laws.kernels import GaussianKernel
from mmspec.recipe import Kit
from mmspec.targets.denoising import Trajectory


class Extrapolator(Protocol):
    """A linear rule from what was seen to what comes: one weight per place seen."""

    @property
    def order(self) -> int: ...  # order + 1 places are looked at, fewer where there are fewer
    def weights(self, seen: Sequence[float], at: float) -> list[float]: ...  # `seen` rises


@dataclass(frozen=True)
class NewtonExtrapolator:
    """The polynomial through the last order + 1 places, exact for polynomials of that degree."""

    order: int = 1

    def __post_init__(self) -> None:
        _check(self.order)

    def weights(self, seen: Sequence[float], at: float) -> list[float]:
        return [
            math.prod((at - other) / (place - other) for other in seen if other != place)
            for place in seen
        ]


@dataclass(frozen=True)
class TaylorExtrapolator:
    """Taylor's series with backward differences for derivatives (TaylorSeer, Liu et al. 2025).

    The differences are divided by the newest spacing alone, so beyond order 1 it is not exact even
    for a parabola; it reacts less to noise than `NewtonExtrapolator`.
    """

    order: int = 1

    def __post_init__(self) -> None:
        _check(self.order)

    def weights(self, seen: Sequence[float], at: float) -> list[float]:
        count = len(seen)
        factor = [[float(i == j) for j in range(count)] for i in range(count)]  # per place
        total, power = factor[-1], 1.0
        for order in range(1, count):
            power *= (at - seen[-1]) / order
            factor = [
                [
                    (new - old) / (seen[i] - seen[i - 1])
                    for new, old in zip(now, before, strict=True)
                ]
                for i, (before, now) in enumerate(pairwise(factor), order)
            ]
            total = [sum(pair) for pair in zip(total, (power * f for f in factor[-1]), strict=True)]
        return total


class Axis(Protocol):
    """What a forecast runs along."""

    def places(self, kernel: GaussianKernel) -> list[float]: ...  # (N,), rising


@dataclass(frozen=True)
class Index:
    """The number of the step."""

    def places(self, kernel: GaussianKernel) -> list[float]:
        return [float(step) for step in range(kernel.steps)]


@dataclass(frozen=True)
class LogRatio:
    """log(alpha / sigma), half the logarithm of the signal-to-noise ratio (as in DPM-Solver)."""

    def places(self, kernel: GaussianKernel) -> list[float]:
        ratio = (kernel.alpha[:-1] / kernel.sigma[:-1]).clamp_min(1e-4)
        places: list[float] = ratio.log().tolist()
        return places


@dataclass
class History:
    """What was seen at the last committed states, newest last, and the window's progress."""

    progress: Progress
    memory: Tensor  # (B, order + 1, *E)
    steps: list[list[int]]  # per row, at most order + 1, rising


@dataclass(frozen=True)
class Extrapolated(Drafter):
    """Like `Frozen`, but what is frozen moves on as it did over the last committed states.

    Order 0 is `Frozen`. Exact with any verifier that is. An ideal denoiser's clean sample is a
    martingale along a random chain, which no extrapolation improves on; that of a real network, and
    other quantities (`Velocity`), may drift.
    """

    window: Window = field(default_factory=Window)
    freeze: Freeze = field(default_factory=Clean)
    forecast: Extrapolator = field(default_factory=NewtonExtrapolator)
    axis: Axis = field(default_factory=Index)
    root: Root = field(default_factory=Refresh)
    kind: Kind = Kind.RACE
    sees: ClassVar[str] = "target-memory"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return kinds(self.window)

    @property
    def trees(self) -> bool:
        return bool(self.window.branching)

    def drawing(self, kind: Kind) -> Drafter:
        return replace(self, kind=kind)

    def begin(self, context: Trajectory) -> History:
        size = (context.batch, self.forecast.order + 1, *context.event)
        memory = torch.zeros(size, dtype=context.state.dtype, device=context.device)
        return History(self.window.begin(context), memory, [[] for _ in range(context.batch)])

    def propose(self, context: Trajectory, state: History) -> Draft:
        levels = seen_levels(context, state.progress, self.window, self.root)
        tree = self.window.topology(max(levels))
        if not tree.nodes:
            return context.nothing()
        memory, steps = self._with_fresh(context, state)
        weights = self._weights(context, steps, tree.depth).to(memory)  # (B, depth, H)

        def law(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            guess = torch.einsum("bh,bh...->b...", weights[:, depth], memory)[:, None]
            mean = self.freeze.mean(context.kernel, guess, x, step)
            return opening(context, depth, x, step, mean)

        return unroll(context, tree, levels, law, self.kind)

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
        places, size = self.axis.places(context.kernel), self.forecast.order + 1
        table = []
        for begun, row in zip(context.step, steps, strict=True):
            seen = [places[step] for step in row]
            ahead = [places[min(begun + k, len(places) - 1)] for k in range(depth)]
            pad = [0.0] * (size - len(seen))
            table.append([pad + (self.forecast.weights(seen, at) if seen else []) for at in ahead])
        return torch.tensor(table, dtype=torch.float64)


def forecast_named(choice: Any, order: int) -> Extrapolator:
    """A `Extrapolator` by name, or the object itself. Raises ValueError listing the names."""
    if choice == "newton":
        return NewtonExtrapolator(order)
    if choice == "taylor":
        return TaylorExtrapolator(order)
    if isinstance(choice, NewtonExtrapolator | TaylorExtrapolator):
        return choice
    raise ValueError(f"forecast={choice!r} is not known; choose one of newton, taylor")


def axis_named(choice: Any) -> Axis:
    """An `Axis` by name, or the object itself. Raises ValueError listing the names."""
    if choice == "index":
        return Index()
    if choice == "log-ratio":
        return LogRatio()
    if isinstance(choice, Index | LogRatio):
        return choice
    raise ValueError(f"axis={choice!r} is not known; choose one of index, log-ratio")


def _check(order: int) -> None:
    if order < 0:
        raise ValueError(f"order={order} is below 0; give 0 (frozen), 1 or 2")


def extrapolated_prediction(kit: Kit) -> Drafter:
    """The target's last predictions, continued."""
    return Extrapolated(
        window_of(kit),
        freeze_named(kit.options["freeze"]),
        forecast_named(kit.options["forecast"], kit.options["order"]),
        axis_named(kit.options["axis"]),
        root_named(kit.options["root"]),
    )
