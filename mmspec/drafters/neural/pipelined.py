"""Drafting the next window while the target verifies the current one.

    sequential   draft x0 x1 x2 | target | draft x3 x4 x5 | target
    overlapped   draft x0 x1 x2 | target |                | target        target: p(x1) .. p(x3)
                                | draft x3 x4 x5 | draft x6 x7 x8

The token that the target adds after a fully accepted window is at the position of the first token
drafted ahead: if they agree the next window is ready, otherwise all of it is dropped. So every
token belongs to a window, and no token is drafted twice.
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
from mmspec.drafters.draft_model import (
    DraftNodes,
    DraftUpdate,
    MultiKindDrafter,
    chain_layout,
    draw_next_token,
)
from mmspec.drafters.lengths.length import Fixed, max_useful_length
from mmspec.drafters.neural.draft_inputs import build_draft_inputs
from mmspec.drafters.neural.small_model import SMALL_MODEL, ModelDrafter, SmallModel
from mmspec.drafters.shapes import SAMPLED_KINDS, Chain
from mmspec.errors import is_integer
from mmspec.recipe import Kit, Recipe
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class PipelinedDrafter(MultiKindDrafter, ModelDrafter):
    """Chains of a draft model with its own cache, `window` tokens per target forward.

    PEARL (Liu et al. 2024), HIPPO, ParallelVLM. After a rejection the target verifies `refill`
    tokens at once: 0 is pre-verification, where it predicts the next token while the window after
    it is drafted; the whole `window` is a round without overlap. A window that is ready has
    `window` - 1 unverified tokens, because its first one was the target's.

    On a CPU the draft model runs in a thread; with processors that need tokens, and on
    accelerators, its kernels are queued before the target's, so that two devices overlap and one
    device runs them in this order. All rows of a batch keep their window or none does. Output: that
    of any exact drafter, since a window drafted ahead is used only if its prefix was accepted,
    which is independent of its tokens.
    """

    model: SmallModel
    window: int
    refill: int = 0
    kind: Kind | None = None
    choices: ClassVar[tuple[Kind, ...]] = Chain.kinds

    def begin(self, context: Context) -> _PipelineState:
        return _PipelineState(self.model.begin(context))

    def propose(self, context: Context, state: _PipelineState) -> Draft:
        max_tokens = max_useful_length(context)
        state.num_sent = min(self.window - 1 if state.tokens else self.refill, max_tokens)
        self._extend_draft(context, state, state.num_sent)
        tokens, distributions = (
            state.tokens[: state.num_sent],
            state.distributions[: state.num_sent],
        )
        state.task = None
        if max_tokens > state.num_sent:
            longer = state.num_sent + self.window
            state.task = BackgroundTask.of(
                context, lambda own: self._extend_draft(own, state, longer)
            )
        if not tokens:
            return context.empty_draft()
        kind = self.kinds[0]
        distribution = Categorical.cat(distributions) if kind in SAMPLED_KINDS else None
        return Draft.chain(torch.cat(tokens, 1), kind, distribution)

    def observe(
        self, context: Context, state: _PipelineState, draft: Draft, scores: Scores, round_: Round
    ) -> _PipelineState:
        if state.task is not None:
            state.task.join()
        read = max(len(state.tokens) - 1, 0)
        is_match = len(state.tokens) > state.num_sent and _matches_draft(
            state.tokens[state.num_sent], round_
        )
        if is_match:
            steps = [state.num_sent + 1] * context.batch
        else:
            steps = [min(accepted, read) for accepted in round_.accepted]
        paths = tuple(tuple(range(count)) for count in steps)
        news = DraftUpdate(draft, scores, round_, paths, read, state.distributions)
        model, done = self.model.keep(context, state.model, news), state.num_sent + 1
        if is_match:
            return _PipelineState(model, state.tokens[done:], state.distributions[done:])
        return _PipelineState(model)

    def _extend_draft(self, context: Context, state: _PipelineState, length: int) -> None:
        """Draft until there are `length` uncommitted tokens; all but the last are read."""
        while len(state.tokens) < length:
            step = len(state.tokens)
            if step:
                *earlier, last = state.tokens
                nodes = DraftNodes(last, chain_layout(step - 1, last.device), tuple(earlier))
                distribution = self.model.predict(context, state.model, nodes)
            else:
                distribution = self.model.predict_first(context, state.model)
            state.distributions.append(distribution)
            state.tokens.append(draw_next_token(distribution, self.kinds[0], context, step))


@dataclass
class _PipelineState:
    """Tokens (B, 1) drafted after the committed ones; the first `num_sent` are being verified."""

    model: Any
    tokens: list[Tensor] = field(default_factory=list)
    distributions: list[Categorical] = field(default_factory=list)
    num_sent: int = 0
    task: BackgroundTask | None = None


def _matches_draft(token: Tensor, round_: Round) -> bool:  # (B, 1)
    """Whether unfinished rows accepted their window and then the target's token was drafted."""
    return all(
        round_.finished[row]
        or (
            round_.accepted[row] == round_.drafted[row]
            and round_.takes_next[row]
            and round_.tokens[row][-1] == drafted
        )
        for row, drafted in enumerate(token[:, 0].tolist())
    )


class BackgroundTask:
    """Work in a thread; `join` waits for it and raises its exception."""

    def __init__(self, thread: Thread | None = None) -> None:
        self.thread = thread
        self.error: Exception | None = None

    @classmethod
    def of(cls, context: Context, work: Callable[[Context], None]) -> BackgroundTask:
        """Run `work` in a thread with its own view of the context, or directly."""
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
                except Exception as error:  # raised by `join`; the loop then retires the drafter
                    made.error = error

        made.thread = Thread(target=run, daemon=True)
        made.thread.start()
        return made

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()
        if self.error is not None:
            raise self.error


def with_pipelined_windows(
    length: int, verifier: Verifier, refill: int | None, **parts: Any
) -> Recipe:
    """A recipe that drafts windows of `length` during verification; `parts` are further fields."""
    return Recipe(
        architecture=pipelined_draft_model,
        execution=Chain(Fixed(length)),
        verifier=verifier,
        sees="auto",
        draft_model=(SMALL_MODEL,),
        options={"refill": refill},
        **parts,
    )


def pipelined_draft_model(kit: Kit) -> Drafter:
    """A draft model that drafts while the target verifies.

    Raises ValueError for a tree, a window below 2, and a model without its own cache.
    """
    if not isinstance(kit.shape, Chain) or not isinstance(kit.shape.length, Fixed):
        raise ValueError(
            "windows that are drafted ahead are chains of one length; give length= a number"
        )
    window, refill = kit.shape.length.max_length, kit.options["refill"]
    refill = window if refill is None else refill
    if window < 2 or not is_integer(refill) or not 0 <= refill <= window:
        raise ValueError(
            f"length={window} and refill={refill!r} are not valid; give a length of 2 or more and "
            "refill= 0 to that"
        )
    if not isinstance(kit.drafter, Reader) or not kit.drafter.can_branch:
        raise ValueError(
            "drafting ahead of the target needs a draft model with its own cache that can be "
            "trimmed; give a smaller model without recurrent layers"
        )
    return PipelinedDrafter(SmallModel(kit.drafter, build_draft_inputs(kit)), window, refill)
