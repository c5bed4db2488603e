"""A head drafts slow, curved motion, stored trajectories draft fast motion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mmspec._attributes import delegate_to
from mmspec.codes.episodes import get_episodes
from mmspec.codes.trajectories import Retrieved
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.actions.kinematics import KinematicMetric
from mmspec.drafters.actions.retrieval import Retrieval, RetrievedMoments
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class RoutedDrafter(Drafter):
    """The hybrid drafter of HeiSD (Zheng et al. 2026): one of two sources per row.

    An action whose metric F is at least `cut` is drafted from stored trajectories, until a token of
    it is rejected; other actions, and the first ones of an episode, are drafted by the head.
    Reconstructed: the cut, and that the head takes over after a rejection.
    """

    head: Autoregressive
    stored: Retrieval
    metric: KinematicMetric
    cut: float = 0.5
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    uses_trees: ClassVar[bool] = True

    sees = delegate_to("head.sees")

    @property
    def required_features(self) -> frozenset[str]:
        return frozenset(self.head.required_features | self.stored.required_features)

    def begin(self, context: Context) -> RoutedState:
        values = [self.metric.of(episode) for episode in get_episodes(context)]
        is_fast = [one is not None and one >= self.cut for one in values]
        found = self.stored.begin(context) if any(is_fast) else ()
        return RoutedState(self.head.begin(context), found, is_fast)

    def propose(self, context: Context, state: RoutedState) -> Draft:
        rows = zip(state.is_fast, context.finished, strict=True)
        state.is_fast = [is_fast and not done for is_fast, done in rows]
        if not any(state.is_fast):
            return self.head.propose(context, state.head)
        own = self.stored.draft_rows(context, state.found, state.is_fast)
        slow = zip(state.is_fast, context.finished, strict=True)
        if all(is_fast or done for is_fast, done in slow):
            state.head = self.head.skip_rows(context, state.head)
            return own
        draft_rows = self.head.propose(context, state.head)
        state.head = self.head.skip_rows(context, state.head, state.is_fast)
        return _select_rows(own, draft_rows, state.is_fast)

    def observe(
        self, context: Context, state: RoutedState, draft: Draft, scores: Scores, round_: Round
    ) -> RoutedState:
        state.head = self.head.observe(context, state.head, draft, scores, round_)
        state.is_fast = [False] * context.batch  # the head drafts the rest of the action
        return state


@dataclass
class RoutedState:
    """The state of a request."""

    head: Any
    found: Sequence[RetrievedMoments]
    is_fast: list[bool]  # rows drafted from stored trajectories


def _select_rows(own: Draft, draft_rows: Draft, is_fast: Sequence[bool]) -> Draft:
    """Select one of two drafts per row."""
    width = max(own.nodes, draft_rows.nodes)
    rows = torch.tensor(is_fast, device=own.tokens.device)[:, None]
    one, other = _pad_nodes(own, width), _pad_nodes(draft_rows, width)
    tokens, parents, mask = (
        torch.where(rows, getattr(one, name), getattr(other, name))
        for name in ("tokens", "parents", "mask")
    )
    assert isinstance(own.extras, Retrieved)
    return Draft(tokens, parents, mask, Kind.DET, extras=replace(own.extras, rows=rows[:, 0]))


def _pad_nodes(draft: Draft, width: int) -> Draft:
    """Append masked nodes, which hold the first token."""
    more = width - draft.nodes
    pad = torch.nn.functional.pad
    tokens = pad(draft.tokens, (0, more))
    tokens[:, draft.nodes :] = draft.tokens[:, :1]
    mask = pad(draft.mask, (0, more), value=False)
    return Draft(tokens, pad(draft.parents, (0, more), value=-1), mask, draft.kind)
