"""Drafting with a carried window whose predictions are corrected by secants.

    step             5    6    7    8
    call before     x5   x6   x7   x8       c(x) predicted at each of them
    last call            y6   y7   y8  y9   secant of step 6: (y6 - x6, c(y6) - c(x6))
    next draft                z7   z8   z9  c(z7) = c(y7) + J (z7 - y7), J from secants of 7, 6, 5

A quasi-Newton method (Broyden 1965) on the window of ParaDiGMS, in the triangular form of Tang et
al. 2024 (ParaTAA, arXiv 2402.09970): a step uses secants of its own and earlier steps only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.denoising.frozen import (
    PredictionDrafter,
    Prefetch,
    Root,
    next_distribution,
    prediction_options,
)
from mmspec.drafters.denoising.unroll import unroll
from mmspec.drafters.denoising.window import Progress, window_of
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.targets.continuous.denoising import Trajectory

DAMPING = 0.05  # of the largest squared length: nearly parallel and much shorter secants count less
STILL = 1e-5  # of a state's length: a shorter move is rounding, and no secant


@dataclass(frozen=True)
class Slots:
    """What is known of consecutive steps, the first of which is `first[b]` in row b."""

    first: list[int]
    state: Tensor  # (B, S, *E) the last state with a prediction
    clean: Tensor  # (B, S, *E) predicted there
    moved: Tensor  # (B, S, *E) newest secant: change of the state between two predictions; 0 = none
    change: Tensor  # (B, S, *E) and of the prediction
    known: Tensor  # (B, S) bool, whether there is a prediction

    @classmethod
    def empty(cls, context: Trajectory, first: int, size: int) -> Slots:
        none = context.state.new_zeros(context.batch, size, *context.event)
        known = torch.zeros(context.batch, size, dtype=torch.bool, device=context.device)
        return cls([first] * context.batch, none, none, none, none, known)

    def move(self, first: list[int], size: int) -> Slots:
        """The slots of other steps; those that are not here are empty."""
        counts = [self.known.shape[1]] * len(first)
        index, inside = align(self.first, first, size, counts, self.known.device)
        parts = (self.state, self.clean, self.moved, self.change, self.known)
        state, clean, moved, change, known = (take(part, index, inside) for part in parts)
        return Slots(first, state, clean, moved, change, known)

    def update(self, state: Tensor, clean: Tensor, new: Tensor) -> Slots:  # (B, S, *E) x2, (B, S)
        """With the predictions `clean` at `state` in the slots of `new`."""
        step = state - self.state
        square, size = ((part * part).flatten(2).sum(-1) for part in (step, state))
        is_secant = expand(new & self.known & (square > STILL**2 * size), state)
        return Slots(
            self.first,
            torch.where(expand(new, state), state, self.state),
            torch.where(expand(new, state), clean, self.clean),
            torch.where(is_secant, step, self.moved),
            torch.where(is_secant, clean - self.clean, self.change),
            self.known | new,
        )

    def predict(self, x: Tensor, slot: int, memory: int) -> Tensor:  # (B, 1, *E) -> same
        """The clean sample at x (B, 1, *E), from the prediction and the secants of the steps.

        With the least change J of slope * identity that maps the secants `moved` to `change`:
        J d = slope d + (change - slope moved)' w, w = (moved moved')^-1 moved d. The slope is that
        of all secants; an ideal denoiser's is alpha / sigma^2 times a covariance, so not negative.
        """
        offset = (x[:, 0] - self.state[:, slot]).flatten(1).double()  # (B, E)
        band = slice(max(slot + 1 - memory, 0), slot + 1)
        moved, change = (part[:, band].flatten(2).double() for part in (self.moved, self.change))
        gram = moved @ moved.mT  # (B, K, K)
        squares = gram.diagonal(dim1=1, dim2=2)
        slope = (moved * change).sum((1, 2)) / squares.sum(1).clamp_min(1e-30)
        slope = slope.clamp_min(0)[:, None]
        ridge = DAMPING * squares.amax(1, keepdim=True) + (squares == 0)  # a zero row is invertible
        damped = gram + torch.diag_embed(ridge)
        # (B, K, 1); without a check for singular ones, which would wait for the device
        weights, _ = torch.linalg.solve_ex(damped, moved @ offset[..., None])
        rest = change - slope[..., None] * moved
        correction: Tensor = slope * offset + (weights * rest).sum(1)
        return self.clean[:, slot, None] + correction.view_as(x).to(x)


@dataclass(frozen=True)
class SecantState:
    """The window's progress and what is known of its steps."""

    progress: Progress
    slots: Slots


@dataclass(frozen=True)
class Secant(PredictionDrafter):
    """Draft each state with the prediction of its step, moved to the new state by secants.

    The predictions are those of `Picard`; `memory` is the number of steps whose secants correct
    them, the own one included. Steps that no call has reached yet use the corrected prediction
    before them.

    Exact with a verifier that decides step by step (`Reflection`), for the reason of `Picard`: a
    prediction and its secants depend on the noise that led to their states, and are used only for
    the successors of these and of later states, whose noise is still unused.
    """

    root: Root = field(default_factory=Prefetch)
    memory: int = 4
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)
    carries_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("memory", self.memory, 1, whole=True, example=4)
        if self.window.branching:
            raise ValueError("a carried window is a chain; give window= instead of tree=")

    def begin(self, context: Trajectory) -> SecantState:
        slots = Slots.empty(context, -self.memory, self.memory)
        return SecantState(self.window.begin(context), slots)

    def propose(self, context: Trajectory, state: SecantState) -> Draft:
        levels = self.levels(context, state.progress)
        tree, slots = self.window.topology(max(levels)), state.slots
        guess = context.known.prediction.clean[:, None]

        def distribution(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal guess
            slot = self.memory + depth
            if slot < slots.known.shape[1]:
                found = slots.predict(x, slot, self.memory)
                guess = torch.where(expand(slots.known[:, slot, None], x), found, guess)
            return next_distribution(context, depth, x, step, context.kernel.mean(x, guess, step))

        return unroll(context, tree, levels, distribution, Kind.RACE)

    def observe(
        self, context: Trajectory, state: SecantState, draft: Draft, scores: Scores, round_: Round
    ) -> SecantState:
        progress = self.window.observe(state.progress, context, draft, scores, round_)
        advance = [len(new) for new in round_.tokens]
        start = [step - new for step, new in zip(context.step, advance, strict=True)]
        count = [
            level + 1 if new else 0
            for level, new in zip(state.progress.levels, advance, strict=True)
        ]
        first = [step - self.memory for step in context.step]
        old = state.slots
        ends = [old.first[row] + old.known.shape[1] for row in range(draft.batch)]
        ends = [max(a, b + c) for a, b, c in zip(ends, start, count, strict=True)]
        size = max(end - own for end, own in zip(ends, first, strict=True))
        size = max(size, self.memory)
        index, new = align(start, first, size, count, context.device)
        seen, clean = (take(scores.features[name], index, new) for name in ("state", "clean"))
        return SecantState(progress, old.move(first, size).update(seen, clean, new))


def align(
    own: list[int], first: list[int], size: int, counts: list[int], device: torch.device
) -> tuple[Tensor, Tensor]:  # (B, size) int64 and bool
    """Where `size` steps from `first` are among `counts` steps from `own`, and whether."""
    shift = torch.tensor([a - b for a, b in zip(first, own, strict=True)], device=device)
    count = torch.tensor(counts, device=device)[:, None]
    index = shift[:, None] + torch.arange(size, device=device)
    inside = (index >= 0) & (index < count)
    return torch.where(inside, index, 0), inside


def take(values: Tensor, index: Tensor, inside: Tensor) -> Tensor:  # (B, M, ...), (B, S) x2
    """Entries at `index`, (B, S, ...), zero where they are not `inside`."""
    rows = torch.arange(len(values), device=values.device)[:, None]
    found = values[rows, index]
    return torch.where(expand(inside, found), found, torch.zeros_like(found))


def expand(mask: Tensor, like: Tensor) -> Tensor:  # (B, S) -> (B, S, 1, 1, ...)
    return mask.reshape(*mask.shape, *(1,) * (like.dim() - mask.dim()))


def secant_window(kit: Kit) -> Drafter:
    """The window of the last call, its predictions corrected by secants."""
    _, root = prediction_options(kit)
    return Secant(window_of(kit), root=root, memory=kit.options["memory"])
