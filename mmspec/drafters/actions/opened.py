"""Drafting in two parts: what needs nothing of the picture rides on the prompt, then the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mmspec.declared import answered_by
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class Opened(Drafter):
    """Propose what `opening` does with the prompt, then what `inner` does of the rest.

    The prompt is read with the first draft in one forward, and `inner` begins behind it, where
    something of that draft is refused; where all of it passes, `inner` is never asked. `opening`
    drafts chains.
    """

    opening: Drafter
    inner: Drafter
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    opens: ClassVar[bool] = True

    sees = answered_by("inner.sees")
    wants = answered_by("inner.wants")
    awaits = answered_by("inner.wants")
    trees = answered_by("inner.trees")

    def begin(self, context: Context) -> OpenedState:
        return OpenedState(self.opening.begin(context))

    def propose(self, context: Context, state: OpenedState) -> Draft:
        if not any(context.generated(row) for row in range(context.batch)):
            return self.opening.propose(context, state.opening)
        if not state.is_open:
            state.inner, state.is_open = self.inner.begin(context), True
        return self.inner.propose(context, state.inner)

    def observe(
        self, context: Context, state: OpenedState, draft: Draft, scores: Scores, kept: Round
    ) -> OpenedState:
        part = "inner" if state.is_open else "opening"
        own: Drafter = getattr(self, part)
        setattr(state, part, own.observe(context, getattr(state, part), draft, scores, kept))
        return state


@dataclass
class OpenedState:
    """What both parts remember of a request."""

    opening: Any
    inner: Any = None
    is_open: bool = False  # whether the inner drafter has begun
