"""Drafting in two stages: first without the image, together with the prompt, then the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mmspec._attributes import delegate_to
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class TwoStageDrafter(Drafter):
    """Propose the draft of `opening` with the prompt, then that of `inner` for the rest.

    The prompt is read with the first draft in one forward, and `inner` begins after it, where a
    token of that draft is rejected; where all of it is accepted, `inner` never runs. `opening`
    drafts chains.
    """

    opening: Drafter
    inner: Drafter
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    drafts_first_token: ClassVar[bool] = True

    sees = delegate_to("inner.sees")
    required_features = delegate_to("inner.required_features")
    deferred_features = delegate_to("inner.required_features")
    uses_trees = delegate_to("inner.uses_trees")

    def begin(self, context: Context) -> TwoStageState:
        return TwoStageState(self.opening.begin(context))

    def propose(self, context: Context, state: TwoStageState) -> Draft:
        if not any(context.num_generated(row) for row in range(context.batch)):
            return self.opening.propose(context, state.opening)
        if not state.is_open:
            state.inner, state.is_open = self.inner.begin(context), True
        return self.inner.propose(context, state.inner)

    def observe(
        self, context: Context, state: TwoStageState, draft: Draft, scores: Scores, round_: Round
    ) -> TwoStageState:
        part = "inner" if state.is_open else "opening"
        own: Drafter = getattr(self, part)
        setattr(state, part, own.observe(context, getattr(state, part), draft, scores, round_))
        return state


@dataclass
class TwoStageState:
    """The states of both stages."""

    opening: Any
    inner: Any = None
    is_open: bool = False  # whether the inner drafter has begun
