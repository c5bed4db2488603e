"""Drafting with a window that is carried on: every state by what was last seen at its own step.

    window      x3   x4   x5   x6        one call sees all of them
    verdict     x3   y4                  x4 refused, y4 committed in its place
    next             y4   x5'  x6'  x7'  x5' by what was seen in y4's step: in x4, x6' in x5, ...

The noise of every step stays the same, so this is Picard's iteration on a window (ParaDiGMS, Shih
et al. 2023).
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
    opening,
    prediction_options,
)
from mmspec.drafters.denoising.unroll import unroll
from mmspec.drafters.denoising.window import Progress, window_of
from mmspec.recipe import Kit
from mmspec.targets.continuous.denoising import Trajectory


@dataclass
class Carried:
    """What the target saw of the last window."""

    progress: Progress
    state: Tensor  # (B, M, *E)
    clean: Tensor  # (B, M, *E) seen there
    step: list[int]  # of the first of them, per row
    count: list[int]  # how many are real, per row


@dataclass(frozen=True)
class Picard(PredictionDrafter):
    """Draft each state with the prediction made at its step in the last call.

    `freeze` says what of that prediction is used at the new state: with `Increment` this is
    Picard's iteration as in ParaDiGMS, with `Clean` that of the chain with its linear part solved.
    Steps that no call has reached yet take the prediction nearest before them.

    Exact with a verifier that is, and that decides step by step (`Reflection`), although it uses
    what was seen in refused states: a prediction at a state knows the noise that led there, and is
    used for that state's successor and later ones only, whose noise is still untouched. (Used for
    an earlier one it would be biased.) With `ToleranceWindow` it is ParaDiGMS.
    """

    root: Root = field(default_factory=Prefetch)
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)
    carries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window.branching:
            raise ValueError("a window is carried on as a chain; give window= instead of tree=")

    def begin(self, context: Trajectory) -> Carried:
        start, batch = context.state[:, None], context.batch
        return Carried(self.window.begin(context), start, start, [0] * batch, [0] * batch)

    def propose(self, context: Trajectory, state: Carried) -> Draft:
        levels = self.levels(context, state.progress)
        tree = self.window.topology(max(levels))
        rows = torch.arange(context.batch, device=context.device)
        ahead = zip(context.step, state.step, strict=True)
        shift = torch.tensor([now - then for now, then in ahead], device=context.device)
        last = torch.tensor([max(count - 1, 0) for count in state.count], device=context.device)
        begun = torch.tensor(state.step, device=context.device)

        def distribution(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            slot = torch.minimum(shift + depth, last)
            old, clean = (value[rows, slot][:, None] for value in (state.state, state.clean))
            at = (begun + slot).clamp_max(context.kernel.steps - 1)[:, None]
            memory = self.freeze.freeze(context.kernel, old, clean, at)
            mean = self.freeze.mean(context.kernel, memory, x, step)
            still = (x == old).flatten(1).all(-1) & (at == step)[:, 0]  # (B,) the iteration is done
            still = still.reshape(-1, *(1,) * (x.dim() - 1))
            mean = torch.where(still, context.kernel.mean(x, clean, step), mean)
            return opening(context, depth, x, step, mean)

        return unroll(context, tree, levels, distribution, Kind.RACE)

    def observe(
        self, context: Trajectory, state: Carried, draft: Draft, scores: Scores, kept: Round
    ) -> Carried:
        progress = self.window.observe(state.progress, context, draft, scores, kept)
        count = [most + 1 for most in state.progress.levels]
        begun = [step - len(new) for step, new in zip(context.step, kept.tokens, strict=True)]
        return Carried(progress, scores.features["state"], scores.features["clean"], begun, count)


def carried_window(kit: Kit) -> Drafter:
    """The window of the last call, every state moved by what was seen at its step."""
    return Picard(window_of(kit), *prediction_options(kit))
