"""The next action, out of those that the robot carried out before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Episode, episodes_of
from mmspec.draft import Draft, Drafter, Kind
from mmspec.drafters.lengths.length import Length
from mmspec.drafters.lookup.prompt_lookup import length_of, ragged
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context


class ActionForecast(Protocol):
    """What comes next, out of what was."""

    @property
    def least(self) -> int: ...  # actions that it needs
    def ahead(self, actions: Tensor, count: int) -> Tensor: ...  # (n, D) -> (count, D), normalised


@dataclass(frozen=True)
class HoldLast:
    """The last action again, the mandatory baseline: at published tolerances much of it passes."""

    least: ClassVar[int] = 1

    def ahead(self, actions: Tensor, count: int) -> Tensor:
        return actions[-1:].expand(count, -1)


@dataclass(frozen=True)
class FromHistory(Drafter):
    """Propose the forecast of the next actions, from the component on that is said next.

    It needs no weights, and only looks at the last `window` actions of the row's `Episode`; one
    with fewer than the forecast needs proposes nothing. An answer of several actions is forecast
    as far as it goes. It needs nothing of the picture, so that the prompt is read with the draft.
    """

    space: ActionSpace
    forecast: ActionForecast
    length: Length
    window: int | None = None  # None = all since the reset
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    opens: ClassVar[bool] = True

    def begin(self, context: Context) -> HistoryState:
        answers = [
            forecast_answer(self.space, context, episode, self.forecast, self.window)
            for episode in episodes_of(context)
        ]
        return HistoryState(self.length.begin(), answers)

    def propose(self, context: Context, state: HistoryState) -> Draft:
        budget = self.length.budget(state.length, context)
        rows = []
        for row, answer in enumerate(state.answers):
            said = context.generated(row)
            rows.append([] if context.finished[row] else list(answer[said : said + budget]))
        return ragged(context, rows)

    def observe(self, context: Context, state: HistoryState, *round_: Any) -> HistoryState:
        state.length = self.length.observe(state.length, round_[-1])
        return state


@dataclass
class HistoryState:
    """What is remembered of a request."""

    length: Any
    answers: Sequence[Sequence[int]]  # the ids of the whole answer as forecast, per row


def forecast_answer(
    space: ActionSpace,
    context: Context,
    episode: Episode,
    forecast: ActionForecast,
    window: int | None,
) -> list[int]:
    """The ids of a row's answer, as far as it goes: as many actions as the request has room for.

    Grippers are held. Nothing where fewer actions are known than the forecast needs.
    """
    known = episode.recent(episode.step if window is None else window)
    if len(known) < forecast.least:
        return []
    ahead = forecast.ahead(known, -(-context.request.room // space.size)).clamp(-1, 1)
    grips = torch.tensor([dim.group == "gripper" for dim in space.dims])
    ids: list[int] = space.tokens(torch.where(grips, known[-1], ahead)).flatten().tolist()
    return ids


def hold_last(kit: Kit) -> Drafter:
    """The robot's last action."""
    return FromHistory(kit.space, HoldLast(), length_of(kit), 1)
