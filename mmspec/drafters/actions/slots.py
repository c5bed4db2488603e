"""Whole actions within a tolerance: the last one again, and slots for what of it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.episodes import episodes_of
from mmspec.declared import answered_by
from mmspec.draft import Draft, Drafter, Kind
from mmspec.drafters.actions.history import HoldLast, forecast_answer
from mmspec.drafters.length import Length
from mmspec.drafters.lookup.prompt_lookup import ragged
from mmspec.drafters.neural.action_slots import ActionSlotsDraft
from mmspec.targets.context import Context


@dataclass(frozen=True, eq=False)
class HeldThenSlots(Drafter):
    """Propose the last action with the prompt, then what parallel slots say of the rest.

    The last action needs nothing of the picture, so the prompt is read with it in one forward, and
    slots are filled only where some of it is refused. Of a slot's law the bin is proposed around
    which most of it lies within the component's `bins`: the one that most likely passes, where the
    likeliest bin alone may stand at the edge. A robot that did nothing yet is drafted for by slots.
    """

    slots: ActionSlotsDraft
    space: ActionSpace
    bins: tuple[float, ...]  # per component: how far a token may lie off
    length: Length
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    opens: ClassVar[bool] = True

    sees = answered_by("slots.sees")
    wants = answered_by("slots.wants")
    awaits = answered_by("slots.wants")

    def begin(self, context: Context) -> HeldState:
        rows = [
            forecast_answer(self.space, context, episode, HoldLast(), 1)
            for episode in episodes_of(context)
        ]
        return HeldState(self.length.begin(), rows)

    def propose(self, context: Context, state: HeldState) -> Draft:
        budget = self.length.budget(state.length, context)
        said = [context.generated(row) for row in range(context.batch)]
        if not any(said):
            return ragged(context, [row[:budget] for row in state.held])
        if not budget:
            return context.nothing()
        if state.prompt is None:
            state.prompt = self.slots.begin(context)
        logits = self.slots.fill(context, state.prompt)
        tokens = middles(logits, self.space.codes, self._radii(logits)).tolist()
        rows = []
        for row, count in enumerate(said):
            ends = count if context.finished[row] else min(context.request.room - 1, count + budget)
            rows.append(tokens[row][count:ends])
        return ragged(context, rows)

    def observe(self, context: Context, state: HeldState, *round_: Any) -> HeldState:
        state.length = self.length.observe(state.length, round_[-1])
        return state

    def _radii(self, logits: Tensor) -> Tensor:  # (B, S, V) -> (S,) int64
        return self._each.to(logits.device)[torch.arange(logits.shape[1]) % self.space.size]

    @cached_property
    def _each(self) -> Tensor:  # (D,) int64
        most = float(self.space.codes.bins)
        return torch.tensor([int(min(one, most)) for one in self.bins])


@dataclass
class HeldState:
    """What is remembered of a request."""

    length: Any
    held: Sequence[Sequence[int]]  # ids of the last action, per row; none of a robot that is new
    prompt: Any = None  # what slots stand behind, once the prompt was read


def middles(logits: Tensor, codes: ActionCodes, radii: Tensor) -> Tensor:  # (B, S, V) -> (B, S)
    """The action ids around which most of each law lies, within `radii` (S,) bins.

    law     .1  .3   0  .2  .2  .2        the likeliest bin is the second; within one bin of the
    within  .4  .4  .5  .4  .6  .4        fifth lies more than within one bin of any other
    """
    law = logits[..., codes.first : codes.vocabulary].float().softmax(-1)
    below = functional.pad(law.cumsum(-1), (1, 0))  # (B, S, bins + 1): the mass before each bin
    place = torch.arange(codes.bins, device=law.device)
    ends = (place + radii[:, None] + 1).clamp_max(codes.bins).expand(len(law), -1, -1)
    starts = (place - radii[:, None]).clamp_min(0).expand(len(law), -1, -1)
    mass = below.gather(-1, ends) - below.gather(-1, starts)
    return mass.argmax(-1) + codes.first
