"""Completing an action without the target once a token of it was refused (KERV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Completion, Episode, episodes_of
from mmspec.declared import answered_by
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.actions.history import ActionForecast, forecast_answer
from mmspec.drafters.lookup.prompt_lookup import ragged
from mmspec.targets.tokens.context import Context


class Occasion(Protocol):
    """When an action is completed behind its first verified draft."""

    def comes(self, episode: Episode, refused: bool) -> bool: ...


@dataclass(frozen=True)
class OnRefusal:
    """Where a drafted token was refused, unless the robot is locked out (KERV, the paper)."""

    def comes(self, episode: Episode, refused: bool) -> bool:
        return refused and episode.step >= episode.locked


@dataclass(frozen=True)
class EveryFew:
    """At every n-th step, whatever was accepted (KERV as released). Raises ValueError below 1."""

    period: int = 4

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period={self.period} steps; give 1 (every step) or more")

    def comes(self, episode: Episode, refused: bool) -> bool:
        return (episode.step + 1) % self.period == 0


@dataclass(frozen=True)
class Completing(Drafter):
    """Draft as `inner` does, and the rest of the answer from a forecast when its occasion comes.

    The rest begins behind what the target said last: the verified tokens and its own correction.
    It is marked as `Completion`, which `CompletionGate` keeps unread; without that gate it is a
    draft like any other. Rows without an occasion wait for a round.
    """

    inner: Drafter
    space: ActionSpace
    forecast: ActionForecast
    occasion: Occasion
    window: int | None = 10
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    sees = answered_by("inner.sees")
    wants = answered_by("inner.wants")
    reads = answered_by("inner.reads")
    trees = answered_by("inner.trees")

    def begin(self, context: Context) -> CompletingState:
        rest = [
            forecast_answer(self.space, context, episode, self.forecast, self.window)
            for episode in episodes_of(context)
        ]
        return CompletingState(self.inner.begin(context), rest, [False] * context.batch)

    def propose(self, context: Context, state: CompletingState) -> Draft:
        if not any(state.due):
            return self.inner.propose(context, state.inner)
        room, rows = context.request.room, list[Sequence[int]]()
        for row, (rest, is_due) in enumerate(zip(state.rest, state.due, strict=True)):
            wanted = is_due and not context.finished[row]
            rows.append(rest[context.generated(row) : room] if wanted else [])
        due = torch.tensor([bool(row) for row in rows], device=context.device)
        state.due = [False] * context.batch
        draft = ragged(context, rows)
        return replace(draft, extras=Completion(due)) if draft.nodes else draft

    def observe(
        self, context: Context, state: CompletingState, draft: Draft, scores: Scores, kept: Round
    ) -> CompletingState:
        if isinstance(draft.extras, Completion):
            return state  # nobody kept it unread: the inner drafter did not make it
        longest = draft.depths().add(1).mul(draft.mask).amax(-1).tolist() if draft.nodes else []
        state.inner = self.inner.observe(context, state.inner, draft, scores, kept)
        for row, depth in enumerate(longest):
            refused = kept.takes_next[row] and kept.accepted[row] < depth
            comes = self.occasion.comes(episodes_of(context)[row], refused)
            state.due[row] = bool(comes and state.rest[row] and not kept.finished[row])
        return state


@dataclass
class CompletingState:
    """What is remembered of a request."""

    inner: Any
    rest: Sequence[Sequence[int]]  # forecast answers, whole; none where too little is known
    due: list[bool]  # rows to be completed in the next round
