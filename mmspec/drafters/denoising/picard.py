"""Drafting with a carried window: every state from the last prediction at its own step.

    window      x3   x4   x5   x6        one call predicts at all of them
    verdict     x3   y4                  x4 rejected, y4 committed in its place
    next             y4   x5'  x6'  x7'  x5' from the prediction at y4's step, in x4; x6' in x5, ...

The noise of every step stays the same, so this is Picard iteration on a window (ParaDiGMS, Shih et
al. 2023).
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
from mmspec.recipe import Kit
from mmspec.targets.continuous.denoising import Trajectory


@dataclass
class PicardState:
    """The target's predictions of the last window."""

    progress: Progress
    state: Tensor  # (B, M, *E)
    clean: Tensor  # (B, M, *E) predicted there
    step: list[int]  # of the first of them, per row
    count: list[int]  # valid ones, per row


@dataclass(frozen=True)
class Picard(PredictionDrafter):
    """Draft each state with the prediction made at its step in the last call.

    `freeze` selects the quantity of that prediction used at the new state: with `Increment` this is
    Picard iteration as in ParaDiGMS, with `Clean` that of the chain with its linear part solved.
    Steps that no call has reached yet use the nearest prediction before them.

    Exact with an exact verifier that decides step by step (`Reflection`), although it uses
    predictions at rejected states: a prediction at a state depends on the noise that led there, and
    is used only for that state's successor and later ones, whose noise is still unused. (Used for
    an earlier one it would be biased.) With `ToleranceWindow` it is ParaDiGMS.
    """

    root: Root = field(default_factory=Prefetch)
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)
    carries_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window.branching:
            raise ValueError("a carried window is a chain; give window= instead of tree=")

    def begin(self, context: Trajectory) -> PicardState:
        start, batch = context.state[:, None], context.batch
        return PicardState(self.window.begin(context), start, start, [0] * batch, [0] * batch)

    def propose(self, context: Trajectory, state: PicardState) -> Draft:
        levels = self.levels(context, state.progress)
        tree = self.window.topology(max(levels))
        rows = torch.arange(context.batch, device=context.device)
        ahead = zip(context.step, state.step, strict=True)
        shift = torch.tensor([now - then for now, then in ahead], device=context.device)
        last = torch.tensor([max(count - 1, 0) for count in state.count], device=context.device)
        first_steps = torch.tensor(state.step, device=context.device)

        def distribution(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            slot = torch.minimum(shift + depth, last)
            old, clean = (value[rows, slot][:, None] for value in (state.state, state.clean))
            at = (first_steps + slot).clamp_max(context.kernel.num_steps - 1)[:, None]
            memory = self.freeze.freeze(context.kernel, old, clean, at)
            mean = self.freeze.mean(context.kernel, memory, x, step)
            is_converged = (x == old).flatten(1).all(-1) & (at == step)[
                :, 0
            ]  # (B,) the iteration has converged
            is_converged = is_converged.reshape(-1, *(1,) * (x.dim() - 1))
            mean = torch.where(is_converged, context.kernel.mean(x, clean, step), mean)
            return next_distribution(context, depth, x, step, mean)

        return unroll(context, tree, levels, distribution, Kind.RACE)

    def observe(
        self, context: Trajectory, state: PicardState, draft: Draft, scores: Scores, round_: Round
    ) -> PicardState:
        progress = self.window.observe(state.progress, context, draft, scores, round_)
        count = [level + 1 for level in state.progress.levels]
        first_steps = [
            step - len(new) for step, new in zip(context.step, round_.tokens, strict=True)
        ]
        return PicardState(
            progress, scores.features["state"], scores.features["clean"], first_steps, count
        )


def carried_window(kit: Kit) -> Drafter:
    """The window of the last call, every state updated with the prediction at its step."""
    return Picard(window_of(kit), *prediction_options(kit))
