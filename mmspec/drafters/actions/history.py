"""Forecasts of the next action from the actions that the robot has executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Episode, get_episodes
from mmspec.draft import Draft, Drafter, Kind
from mmspec.drafters.lengths.length import Length
from mmspec.drafters.lookup.prompt_lookup import length_of, pad_chains
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context


class ActionForecast(Protocol):
    """Forecasts the next actions from past ones."""

    @property
    def min_actions(self) -> int: ...  # actions required
    def ahead(self, actions: Tensor, count: int) -> Tensor: ...  # (n, D) -> (count, D), normalised


@dataclass(frozen=True)
class HoldLast:
    """Repeat the last action: the baseline, since published tolerances accept much of it."""

    min_actions: ClassVar[int] = 1

    def ahead(self, actions: Tensor, count: int) -> Tensor:
        return actions[-1:].expand(count, -1)


@dataclass(frozen=True)
class HistoryDrafter(Drafter):
    """Propose the forecast of the next actions, from the next component on.

    Needs no weights; uses the last `window` actions of the row's `Episode`, and proposes nothing
    for an episode with fewer actions than the forecast needs. An output of several actions is
    forecast as far as it goes. Independent of the image, so that the prompt is read together with
    the draft.
    """

    space: ActionSpace
    forecast: ActionForecast
    length: Length
    window: int | None = None  # None = all since the last reset
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    drafts_first_token: ClassVar[bool] = True

    def begin(self, context: Context) -> HistoryState:
        forecasts = [
            forecast_tokens(self.space, context, episode, self.forecast, self.window)
            for episode in get_episodes(context)
        ]
        return HistoryState(self.length.begin(), forecasts)

    def propose(self, context: Context, state: HistoryState) -> Draft:
        budget = self.length.budget(state.length, context)
        rows = []
        for row, forecast_ids in enumerate(state.forecasts):
            start = context.num_generated(row)
            rows.append([] if context.finished[row] else list(forecast_ids[start : start + budget]))
        return pad_chains(context, rows)

    def observe(self, context: Context, state: HistoryState, *round_: Any) -> HistoryState:
        state.length = self.length.observe(state.length, round_[-1])
        return state


@dataclass
class HistoryState:
    """The state of a request."""

    length: Any
    forecasts: Sequence[Sequence[int]]  # ids of the whole forecast output, per row


def forecast_tokens(
    space: ActionSpace,
    context: Context,
    episode: Episode,
    forecast: ActionForecast,
    window: int | None,
) -> list[int]:
    """The token ids of a row's forecast: as many actions as the request has positions for.

    Grippers are held. Empty where fewer actions are known than the forecast needs.
    """
    known = episode.recent(episode.step if window is None else window)
    if len(known) < forecast.min_actions:
        return []
    ahead = forecast.ahead(known, -(-context.request.max_new_tokens // space.size))
    grips = torch.tensor([dim.group == "gripper" for dim in space.dims])
    ids: list[int] = space.encode(torch.where(grips, known[-1], ahead)).flatten().tolist()
    return ids


def hold_last(kit: Kit) -> Drafter:
    """The robot's last action."""
    return HistoryDrafter(kit.space, HoldLast(), length_of(kit), 1)
