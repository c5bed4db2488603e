"""Drafting the next window while the target verifies this one.

    sequential   draft x0 x1 x2 | target | draft x3 x4 x5 | target
    overlapped   draft x0 x1 x2 | target |                | target        target: p(x1) .. p(x3)
                                | draft x3 x4 x5 | draft x6 x7 x8

The token that the target adds behind a window kept whole stands where the first one drafted ahead
stands: where they are the same the next window is ready, and otherwise all of it is dropped. So
there is no token beside the windows, and no token is drafted twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Drafter, Kind, Round, Scores, Verifier
from mmspec.drafters.chosen_kind import ChoosesKind
from mmspec.drafters.growth import LAWFUL, Chain, News, Nodes, link, next_token
from mmspec.drafters.lengths.length import Fixed, useful
from mmspec.drafters.neural.sight import sight
from mmspec.drafters.neural.small_model import SMALL_MODEL, OfModel, SmallModel
from mmspec.errors import is_whole
from mmspec.recipe import Kit, Recipe
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class DraftsAhead(ChoosesKind, OfModel):
    """Chains of a draft model with a memory of its own, `window` tokens per target forward.

    PEARL (Liu et al. 2024), HIPPO, ParallelVLM. Behind a rejection the target is asked about
    `refill` tokens at once: 0 is pre-verification, where it says the next token while the window
    behind that is drafted, and the whole `window` is a round of waiting. A window that is ready has
    `window` - 1 open tokens, because its first one was what the target said.

    On a CPU the draft model runs in a thread beside the target; with processors that look at
    tokens, and on accelerators, its kernels are put in the queue before the target's, so that two
    devices work at once and one does the work in this order. Rows of a batch go on together or not
    at all. What comes out is that of any exact drafter: a window drafted ahead is used only where
    its prefix is what was kept, which says nothing of the tokens in it.
    """

    model: SmallModel
    window: int
    refill: int = 0
    kind: Kind | None = None
    choices: ClassVar[tuple[Kind, ...]] = Chain.kinds

    def begin(self, context: Context) -> _Flight:
        return _Flight(self.model.begin(context))

    def propose(self, context: Context, state: _Flight) -> Draft:
        room = useful(context)
        state.sent = min(self.window - 1 if state.tokens else self.refill, room)
        self._extend(context, state, state.sent)
        tokens, distributions = state.tokens[: state.sent], state.distributions[: state.sent]
        state.ahead = None
        if room > state.sent:
            longer = state.sent + self.window
            state.ahead = Beside.of(context, lambda own: self._extend(own, state, longer))
        if not tokens:
            return context.nothing()
        kind = self.kinds[0]
        distribution = Categorical.cat(distributions) if kind in LAWFUL else None
        return Draft.chain(torch.cat(tokens, 1), kind, distribution)

    def observe(
        self, context: Context, state: _Flight, draft: Draft, scores: Scores, kept: Round
    ) -> _Flight:
        if state.ahead is not None:
            state.ahead.join()
        read = max(len(state.tokens) - 1, 0)
        goes_on = len(state.tokens) > state.sent and _as_drafted(state.tokens[state.sent], kept)
        if goes_on:
            steps = [state.sent + 1] * context.batch
        else:
            steps = [min(accepted, read) for accepted in kept.accepted]
        paths = tuple(tuple(range(count)) for count in steps)
        news = News(draft, scores, kept, paths, read, state.distributions)
        model, done = self.model.keep(context, state.model, news), state.sent + 1
        if goes_on:
            return _Flight(model, state.tokens[done:], state.distributions[done:])
        return _Flight(model)

    def _extend(self, context: Context, state: _Flight, length: int) -> None:
        """Draft until `length` tokens stand behind what is committed; all but the last are read."""
        while len(state.tokens) < length:
            step = len(state.tokens)
            if step:
                *earlier, last = state.tokens
                nodes = Nodes(last, link(step - 1, last.device), tuple(earlier))
                distribution = self.model.predict(context, state.model, nodes)
            else:
                distribution = self.model.predict_first(context, state.model)
            state.distributions.append(distribution)
            state.tokens.append(next_token(distribution, self.kinds[0], context, step))


@dataclass
class _Flight:
    """Tokens (B, 1) drafted behind what is committed, the first `sent` of them being verified."""

    model: Any
    tokens: list[Tensor] = field(default_factory=list)
    distributions: list[Categorical] = field(default_factory=list)
    sent: int = 0
    ahead: Beside | None = None


def _as_drafted(token: Tensor, kept: Round) -> bool:  # (B, 1)
    """Whether every unfinished row kept its window, and the target then said what was drafted."""
    return all(
        kept.finished[row]
        or (
            kept.accepted[row] == kept.drafted[row]
            and kept.takes_next[row]
            and kept.tokens[row][-1] == drafted
        )
        for row, drafted in enumerate(token[:, 0].tolist())
    )


class Beside:
    """Work that was begun; `join` waits for it, and raises what it raised."""

    def __init__(self, thread: Thread | None = None) -> None:
        self.thread = thread
        self.error: Exception | None = None

    @classmethod
    def of(cls, context: Context, work: Callable[[Context], None]) -> Beside:
        """Begin `work`: in a thread with its own view of the context, or, where that cannot be
        or is of no use, here."""
        made = cls()
        if context.device.type != "cpu" or context.sampling.needs_prefix:
            work(context)
            return made
        own = replace(context, history=tuple(list(row) for row in context.history))
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())

        def run() -> None:
            with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
                try:
                    work(own)
                except Exception as error:  # the drafter is then retired by the loop
                    made.error = error

        made.thread = Thread(target=run, daemon=True)
        made.thread.start()
        return made

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()
        if self.error is not None:
            raise self.error


def with_windows_ahead(length: int, verifier: Verifier, refill: int | None, **parts: Any) -> Recipe:
    """A recipe that drafts windows of `length` while the target verifies; further fields."""
    return Recipe(
        architecture=drafting_ahead,
        execution=Chain(Fixed(length)),
        verifier=verifier,
        sees="auto",
        draft_model=(SMALL_MODEL,),
        options={"refill": refill},
        **parts,
    )


def drafting_ahead(kit: Kit) -> Drafter:
    """A draft model that goes on while the target verifies.

    Raises ValueError for a tree, a window below 2, and a model without a memory of its own.
    """
    if not isinstance(kit.shape, Chain) or not isinstance(kit.shape.length, Fixed):
        raise ValueError(
            "windows that are drafted ahead are chains of one length; give length= a number"
        )
    window, refill = kit.shape.length.most, kit.options["refill"]
    refill = window if refill is None else refill
    if window < 2 or not is_whole(refill) or not 0 <= refill <= window:
        raise ValueError(
            f"length={window} and refill={refill!r} are no windows; give a length of 2 or more and "
            "refill= 0 to that"
        )
    if not isinstance(kit.drafter, Reader) or not kit.drafter.can_branch:
        raise ValueError(
            "drafting ahead of the target needs a draft model with a memory of its own that can "
            "forget; give a smaller model without recurrent layers"
        )
    return DraftsAhead(SmallModel(kit.drafter, sight(kit)), window, refill)
