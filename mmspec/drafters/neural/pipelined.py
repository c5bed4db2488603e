"""Drafting the next window while the target verifies the current one.

    sequential   draft x0 x1 x2 | target | draft x3 x4 x5 | target
    overlapped   draft x0 x1 x2 | target |                | target        target: p(x1) .. p(x3)
                                | draft x3 x4 x5 | draft x6 x7 x8

The token that the target adds after a fully accepted window is at the position of the first token
drafted ahead: if they agree the next window is ready, otherwise all of it is dropped. So every
token belongs to a window, and no token is drafted twice. Rows of a batch differ: while one verifies
a window that was ready, another without one verifies nothing and drafts beside it.

With several windows ahead, drafting does not wait for the target, nor the target for a window:

    ahead        draft x0 x1 x2 | target: p(x1) .. p(x3)  | target: p(x4) .. p(x5)
                                | draft x3 x4 x5 | x6 x7  | draft x8 ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.sampling import Prefix
from mmspec.draft import Draft, Drafter, Kind, Round, Scores, Verifier
from mmspec.drafters.draft_model import (
    ModelDrafter,
    MultiKindDrafter,
    draft_distribution,
    draw_next_token,
)
from mmspec.drafters.lengths.length import Fixed, max_useful_length
from mmspec.drafters.neural.draft_inputs import build_draft_inputs
from mmspec.drafters.neural.small_model import SMALL_MODEL, SmallModel
from mmspec.drafters.shapes import SAMPLED_KINDS, Chain
from mmspec.errors import check_number, is_integer
from mmspec.models.compatibility import check_same_device
from mmspec.recipe import Kit, Recipe
from mmspec.targets.memory import build_block, to_column
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context, prefix_of
from mmspec.trees import Paths


@dataclass(frozen=True)
class PipelinedDrafter(MultiKindDrafter, ModelDrafter):
    """Chains of a draft model with its own cache, `window` tokens per target forward.

    PEARL (Liu et al. 2024), HIPPO, ParallelVLM. After a rejection the target verifies `refill`
    tokens at once: 0 is pre-verification, where it predicts the next token while the window after
    it is drafted; the whole `window` is a round without overlap. A window that is ready has
    `window` - 1 unverified tokens, because its first one was the target's.

    With `ahead` above 1 the target verifies what is ready, at most a window, while up to that many
    windows are drafted, and drafting stops at the next token when the target has verified (early
    cancellation of PipeInfer, Butler et al. 2024; the token buffer of AMUSD, McDanel 2024). How
    much was drafted then depends on the time it took: tokens do with rules that draw anew, and not
    with greedy decoding or coupled noise. Where no thread is used, one window is drafted ahead.

    On a CPU the draft model runs in a thread; with processors that need tokens, and on
    accelerators, its kernels are queued before the target's, so that two devices overlap and one
    device runs them in this order. Each row of a batch keeps or drops its own window, so acceptance
    is that of a single row. Output: that of any exact drafter, since a window drafted ahead is used
    only if its prefix was accepted, which is independent of its tokens.
    """

    model: SmallModel
    window: int
    refill: int = 0
    ahead: int = 1  # windows
    kind: Kind | None = None
    choices: ClassVar[tuple[Kind, ...]] = Chain.kinds

    def begin(self, context: Context) -> _PipelineState:
        return _PipelineState(self.model.begin(context), [[] for _ in range(context.batch)])

    def propose(self, context: Context, state: _PipelineState) -> Draft:
        longest = max_useful_length(context)
        state.sent = [
            0 if finished else min(len(row) or self.refill, self.window, longest)
            for row, finished in zip(state.places, context.finished, strict=True)
        ]
        ahead = self.ahead if BackgroundTask.needs_thread(context) else 1
        goal = [
            sent + max(self.window, min(self.window * ahead, longest + 1 - sent))
            if sent < longest and not finished
            else sent
            for sent, finished in zip(state.sent, context.finished, strict=True)
        ]
        self._extend_draft(context, state, state.sent, goal)
        draft = self._make_draft(context, state)
        state.task = None
        if any(len(row) < high for row, high in zip(state.places, goal, strict=True)):
            state.task = BackgroundTask.of(
                context, lambda own: self._extend_draft(own, state, goal, goal)
            )
        return draft

    def _make_draft(self, context: Context, state: _PipelineState) -> Draft:
        """The first `sent[b]` drafted tokens of each row."""
        width = max(state.sent)
        if not width:
            return context.empty_draft()
        sent = [row[:count] for row, count in zip(state.places, state.sent, strict=True)]
        kind = self.kinds[0]
        distribution = state.take_distributions(sent) if kind in SAMPLED_KINDS else None
        unfinished = [c for c, done in zip(state.sent, context.finished, strict=True) if not done]
        if min(unfinished) == width:
            return Draft.chain(state.take(sent), kind, distribution)
        counts = torch.tensor(state.sent, device=context.device)[:, None]
        mask = torch.arange(width, device=context.device) < counts
        return Draft.chain(state.take(sent), kind, distribution, mask)

    def observe(
        self, context: Context, state: _PipelineState, draft: Draft, scores: Scores, round_: Round
    ) -> _PipelineState:
        if state.task is not None:
            if self.ahead > 1:
                state.is_cancelled.set()
            state.task.join()
        match = _match_draft(state, round_)
        before = [
            len(line) - len(new) for line, new in zip(context.history, round_.tokens, strict=True)
        ]
        valid = [
            read if ready else start + accepted
            for read, ready, start, accepted in zip(
                state.model.read, match, before, round_.accepted, strict=True
            )
        ]
        self.model.rewind(state.model, valid)
        kept = [
            row[count + 1 :] if ready else []
            for row, count, ready in zip(state.places, state.sent, match, strict=True)
        ]
        return state.keep(kept)

    def _extend_draft(
        self, context: Context, state: _PipelineState, least: Sequence[int], most: Sequence[int]
    ) -> None:
        """Draft until all rows have `least` uncommitted tokens; none has more than `most`.

        All but the last are read. Stops before the next token when it is cancelled.
        """
        while any(len(row) < low for row, low in zip(state.places, least, strict=True)):
            if state.is_cancelled.is_set():
                return
            rows = [len(row) < high for row, high in zip(state.places, most, strict=True)]
            step = to_column([len(row) for row in state.places], context.device)
            distribution = self._predict(context, state, rows, step)
            state.distributions.append(distribution)
            state.tokens.append(draw_next_token(distribution, self.kinds[0], context, step))
            for row, is_drafted in zip(state.places, rows, strict=True):
                if is_drafted:
                    row.append(len(state.tokens) - 1)

    def _predict(
        self, context: Context, state: _PipelineState, rows: Sequence[bool], step: int | Tensor
    ) -> Categorical:  # (B, 1)
        """The distribution after `step` drafted tokens; what `rows` read for it stays cached."""
        model, waiting = state.model, []
        for row, line in enumerate(context.history):
            unread = line[model.read[row] :] if rows[row] else line[-1:]
            waiting.append([0] if state.places[row] else unread)
        block = build_block(waiting, None, model.memory.like)
        if any(state.places):
            is_draft = torch.tensor([[bool(row)] for row in state.places], device=context.device)
            drafted = state.take([row[-1:] for row in state.places])
            last = torch.where(is_draft, drafted, block.tokens[:, -1:])
            block = replace(block, tokens=torch.cat((block.tokens[:, :-1], last), 1))
        logits, _ = self.model.backbone.read(model.memory, block)
        counts = [len(line) if row else 0 for line, row in zip(waiting, rows, strict=True)]
        model.memory.advance(counts)
        model.read = [read + count for read, count in zip(model.read, counts, strict=True)]
        prefix = state.prefix(context) if context.sampling.needs_prefix else None
        return draft_distribution(context, logits, prefix, step)


@dataclass
class _PipelineState:
    """Tokens drafted after the committed ones, by the step that drew them for all rows.

    `places[b]` are the steps of row b's tokens; the first `sent[b]` are being verified.
    """

    model: Any
    places: list[list[int]]
    tokens: list[Tensor] = field(default_factory=list)  # (B, 1) per step
    distributions: list[Categorical] = field(default_factory=list)  # (B, 1) per step
    sent: list[int] = field(default_factory=list)
    task: BackgroundTask | None = None
    is_cancelled: Event = field(default_factory=Event)

    def prefix(self, context: Context) -> Prefix:
        """Committed and drafted tokens of a row, for logits processors."""

        def read() -> Paths:
            steps = torch.cat(self.tokens, 1).tolist() if self.tokens else [[]] * len(self.places)
            return [
                [[line[step] for step in places]]
                for line, places in zip(steps, self.places, strict=True)
            ]

        return prefix_of(context, read)

    def take(self, places: Sequence[Sequence[int]]) -> Tensor:  # (B, n)
        """The tokens of these steps per row; shorter rows end in arbitrary ones."""
        first, *others = places
        if all(row == first for row in others):
            return torch.cat([self.tokens[step] for step in first], 1)
        tokens = torch.cat(self.tokens, 1)
        return tokens.gather(1, _pad_rows(places, tokens.device))

    def take_distributions(self, places: Sequence[Sequence[int]]) -> Categorical:  # (B, n)
        first, *others = places
        if all(row == first for row in others):
            return Categorical.cat([self.distributions[step] for step in first])
        columns = _pad_rows(places, self.tokens[0].device)
        return Categorical.cat(self.distributions)[torch.arange(len(places))[:, None], columns]

    def keep(self, places: Sequence[Sequence[int]]) -> _PipelineState:
        """The state with these steps only."""
        start = min((row[0] for row in places if row), default=len(self.tokens))
        moved = [[step - start for step in row] for row in places]
        return _PipelineState(self.model, moved, self.tokens[start:], self.distributions[start:])


def _pad_rows(places: Sequence[Sequence[int]], device: torch.device) -> Tensor:  # (B, n)
    width = max(len(row) for row in places)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in places], device=device)


def _match_draft(state: _PipelineState, round_: Round) -> list[bool]:
    """Whether a row accepted its window and the target's token after it was drafted ahead."""
    ahead = [row[sent : sent + 1] for row, sent in zip(state.places, state.sent, strict=True)]
    if not any(ahead):
        return [False] * len(ahead)
    drafted = state.take(ahead)[:, 0].tolist()
    return [
        bool(ahead[row])
        and not round_.finished[row]
        and round_.accepted[row] == state.sent[row]
        and round_.takes_next[row]
        and round_.tokens[row][-1] == token
        for row, token in enumerate(drafted)
    ]


class BackgroundTask:
    """Work in a thread; `join` waits for it and raises its exception."""

    def __init__(self, thread: Thread | None = None) -> None:
        self.thread = thread
        self.error: Exception | None = None

    @staticmethod
    def needs_thread(context: Context) -> bool:
        """Whether work overlaps with the target's only in a thread, and may run in one."""
        return context.device.type == "cpu" and not context.sampling.needs_prefix

    @classmethod
    def of(cls, context: Context, work: Callable[[Context], None]) -> BackgroundTask:
        """Run `work` in a thread with its own view of the context, or directly."""
        made = cls()
        if not cls.needs_thread(context):
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
    length: int, verifier: Verifier, refill: int | None, ahead: int = 1, **parts: Any
) -> Recipe:
    """A recipe that drafts windows of `length` during verification; `parts` are further fields.

    With more than one window `ahead` their number is an option.
    """
    return Recipe(
        architecture=pipelined_draft_model,
        execution=Chain(Fixed(length)),
        verifier=verifier,
        sees="auto",
        draft_model=(SMALL_MODEL,),
        options={"refill": refill} | ({"ahead": ahead} if ahead > 1 else {}),
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
    ahead = kit.options.get("ahead", 1)
    check_number("ahead", ahead, 1, whole=True, example=4)
    if not isinstance(kit.drafter, Reader) or not kit.drafter.can_branch:
        raise ValueError(
            "drafting ahead of the target needs a draft model with its own cache that can be "
            "trimmed; give a smaller model without recurrent layers"
        )
    check_same_device(kit.target, kit.drafter)
    model = SmallModel(kit.drafter, build_draft_inputs(kit))
    return PipelinedDrafter(model, window, refill, ahead)
