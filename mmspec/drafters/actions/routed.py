"""A head drafts where a robot moves slowly round curves, stored trajectories where it is quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mmspec.codes.episodes import episodes_of
from mmspec.codes.trajectories import Retrieved
from mmspec.declared import answered_by
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.actions.kinematics import KinematicMetric
from mmspec.drafters.actions.retrieval import FoundMoments, Retrieval
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class Routed(Drafter):
    """The hybrid drafter of HeiSD (Zheng et al. 2026): one source or the other, row by row.

    An action whose metric F is at least `cut` is drafted from stored trajectories, until a token of
    it is refused; others, and the first ones of an episode, are drafted by the head. Reconstructed:
    the cut, and that a refusal hands over to the head.
    """

    head: Autoregressive
    stored: Retrieval
    metric: KinematicMetric
    cut: float = 0.5
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    trees: ClassVar[bool] = True

    sees = answered_by("head.sees")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset(self.head.wants | self.stored.wants)

    def begin(self, context: Context) -> RoutedState:
        measured = [self.metric.of(episode) for episode in episodes_of(context)]
        quick = [one is not None and one >= self.cut for one in measured]
        found = self.stored.begin(context) if any(quick) else ()
        return RoutedState(self.head.begin(context), found, quick)

    def propose(self, context: Context, state: RoutedState) -> Draft:
        rows = zip(state.quick, context.finished, strict=True)
        state.quick = [quick and not done for quick, done in rows]
        if not any(state.quick):
            return self.head.propose(context, state.head)
        own = self.stored.drafted(context, state.found, state.quick)
        slow = zip(state.quick, context.finished, strict=True)
        if all(quick or done for quick, done in slow):
            state.head = self.head.silent(context, state.head)
            return own
        drafted = self.head.propose(context, state.head)
        state.head = self.head.silent(context, state.head, state.quick)
        return _chosen(own, drafted, state.quick)

    def observe(
        self, context: Context, state: RoutedState, draft: Draft, scores: Scores, kept: Round
    ) -> RoutedState:
        state.head = self.head.observe(context, state.head, draft, scores, kept)
        state.quick = [False] * context.batch  # whatever is left of an action is the head's
        return state


@dataclass
class RoutedState:
    """What is remembered of a request."""

    head: Any
    found: Sequence[FoundMoments]
    quick: list[bool]  # rows that stored trajectories draft for


def _chosen(own: Draft, drafted: Draft, quick: Sequence[bool]) -> Draft:
    """Row by row one draft or the other."""
    width = max(own.nodes, drafted.nodes)
    rows = torch.tensor(quick, device=own.tokens.device)[:, None]
    one, other = _widened(own, width), _widened(drafted, width)
    tokens, parents, mask = (
        torch.where(rows, getattr(one, name), getattr(other, name))
        for name in ("tokens", "parents", "mask")
    )
    assert isinstance(own.extras, Retrieved)
    return Draft(tokens, parents, mask, Kind.DET, extras=replace(own.extras, rows=rows[:, 0]))


def _widened(draft: Draft, width: int) -> Draft:
    """The same with nodes that are no proposals at the end; they hold the first token."""
    more = width - draft.nodes
    pad = torch.nn.functional.pad
    tokens = pad(draft.tokens, (0, more))
    tokens[:, draft.nodes :] = draft.tokens[:, :1]
    mask = pad(draft.mask, (0, more), value=False)
    return Draft(tokens, pad(draft.parents, (0, more), value=-1), mask, draft.kind)
