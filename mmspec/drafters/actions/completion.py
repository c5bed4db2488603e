"""Completing an action without the target after a token of it was rejected (KERV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from mmspec._attributes import delegate_to
from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Completion, Episode, get_episodes
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.actions.history import ActionForecast, forecast_tokens
from mmspec.drafters.lookup.prompt_lookup import pad_chains
from mmspec.targets.tokens.context import Context


class CompletionTrigger(Protocol):
    """When an action is completed after its first verified draft."""

    def is_due(self, episode: Episode, was_refused: bool) -> bool: ...


@dataclass(frozen=True)
class OnRefusal:
    """After a rejected draft token, unless the robot is locked out (KERV, the paper)."""

    def is_due(self, episode: Episode, was_refused: bool) -> bool:
        return was_refused and episode.step >= episode.locked_until


@dataclass(frozen=True)
class EveryFew:
    """At every n-th step (the released code of KERV). Raises ValueError below 1."""

    period: int = 4

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period={self.period} must be 1 (every step) or more")

    def is_due(self, episode: Episode, was_refused: bool) -> bool:
        return (episode.step + 1) % self.period == 0


@dataclass(frozen=True)
class CompletingDrafter(Drafter):
    """Draft with `inner`, and the rest of the output from a forecast when the trigger is due.

    The rest begins after the verified tokens and the target's correction. It is marked as
    `Completion`, which `CompletionGate` accepts without a forward; without that gate it is an
    ordinary draft. Rows that are not due wait for a round.
    """

    inner: Drafter
    space: ActionSpace
    forecast: ActionForecast
    occasion: CompletionTrigger
    window: int | None = 10
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    sees = delegate_to("inner.sees")
    required_features = delegate_to("inner.required_features")
    reads_prompt = delegate_to("inner.reads_prompt")
    uses_trees = delegate_to("inner.uses_trees")

    def begin(self, context: Context) -> CompletingState:
        forecasts = [
            forecast_tokens(self.space, context, episode, self.forecast, self.window)
            for episode in get_episodes(context)
        ]
        return CompletingState(self.inner.begin(context), forecasts, [False] * context.batch)

    def propose(self, context: Context, state: CompletingState) -> Draft:
        if not any(state.is_pending):
            return self.inner.propose(context, state.inner)
        max_tokens, rows = context.request.max_new_tokens, list[Sequence[int]]()
        for row, (forecasts, is_due) in enumerate(
            zip(state.forecasts, state.is_pending, strict=True)
        ):
            is_completed = is_due and not context.finished[row]
            rows.append(forecasts[context.num_generated(row) : max_tokens] if is_completed else [])
        is_pending = torch.tensor([bool(row) for row in rows], device=context.device)
        state.is_pending = [False] * context.batch
        draft = pad_chains(context, rows)
        return replace(draft, extras=Completion(is_pending)) if draft.nodes else draft

    def observe(
        self, context: Context, state: CompletingState, draft: Draft, scores: Scores, round_: Round
    ) -> CompletingState:
        if isinstance(draft.extras, Completion):
            return state  # no gate accepted it, and the inner drafter did not propose it
        longest = draft.depths().add(1).mul(draft.mask).amax(-1).tolist() if draft.nodes else []
        state.inner = self.inner.observe(context, state.inner, draft, scores, round_)
        for row, depth in enumerate(longest):
            was_refused = round_.takes_next[row] and round_.accepted[row] < depth
            is_due = self.occasion.is_due(get_episodes(context)[row], was_refused)
            state.is_pending[row] = bool(
                is_due and state.forecasts[row] and not round_.finished[row]
            )
        return state


@dataclass
class CompletingState:
    """The state of a request."""

    inner: Any
    forecasts: Sequence[
        Sequence[int]
    ]  # whole forecast outputs; empty where the history is too short
    is_pending: list[bool]  # rows to complete in the next round
