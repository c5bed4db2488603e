"""A batch of requests in the decoding loop, whose rows join and leave between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, cast

import torch

from mmspec.decode import BrokenLogits, Parts, Running
from mmspec.draft import Round, Scores
from mmspec.modality import Call
from mmspec.stats import Ledger
from mmspec.targets.memory import Memory, RowMemories
from mmspec.targets.rows import CannotJoin, join_states, swap_out
from mmspec.targets.stop import RowStops, Stop
from mmspec.targets.tokens.context import Context
from mmspec.targets.tokens.rows import drop_context_row, drop_padding, join_contexts

Observer = Callable[[Round], Any]
TokenScores = list[tuple[float, list[tuple[int, float]]]]  # log-probability; the likeliest tokens


@dataclass(eq=False)
class Row:
    """One request of one row, from its prompt to its last token."""

    call: Call
    observer: Observer | None = None
    num_alternatives: int | None = None  # tokens scored beside each new one; None = no scores
    tokens: list[int] = field(default_factory=list)
    scores: TokenScores = field(default_factory=list)
    error: BaseException | None = None
    is_finished: bool = False
    first_token_at: float | None = None  # of `time.monotonic`
    start: int = 0  # round of the batch that was its round 0
    observed: list[int] = field(default_factory=list)  # tokens of an earlier run, see `restart`
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        recipe = self.call.recipe
        sees = self.call.parts.drafter.sees
        self.ledger = Ledger(recipe.name or "custom", recipe.exact, sees)

    def restart(self) -> Row:
        """The same request from its prompt on; what was observed is not observed again."""
        seen = max(self.tokens, self.observed, key=len)
        made = Row(self.call, self.observer, self.num_alternatives, observed=list(seen))
        made.first_token_at = self.first_token_at
        return made

    def read(self, round_: Round, row: int, scores: Scores | None) -> None:
        """Take the new tokens of a round of the batch."""
        own = slice_round(round_, row, self.start)
        self.ledger.add(own)
        if own.tokens[0] and self.first_token_at is None:
            self.first_token_at = monotonic()
        before = len(self.tokens)
        self.tokens += own.tokens[0]
        self.is_finished = own.finished[0]
        try:
            if self.num_alternatives is not None and scores is not None:
                places = [0, *(node + 1 for node in own.path[0])][: len(own.tokens[0])]
                logits: Any = scores.distribution
                self.scores += rank_tokens(
                    logits.scores[row, places], own.tokens[0], self.num_alternatives
                )
            if self.observer is not None:
                self._observe(own, before)
        except Exception as error:  # of an observer: the other rows go on
            self.error, self.is_finished = error, True

    def _observe(self, own: Round, before: int) -> None:
        """Pass a round on, without the tokens of an earlier run."""
        assert self.observer is not None
        left = self.observed[before:]
        new = own.tokens[0]
        if list(new[: len(left)]) != left[: len(new)]:
            raise RuntimeError(
                "memory was short, and the tokens of the second run are not those of the first, "
                "which were returned already; send the request again"
            )
        if left and new:
            if len(new) <= len(left):
                return
            own = replace(own, tokens=(new[len(left) :],))
        self.observer(own)


class RowBatch:
    """Rows of equal kind that are decoded together; all are greedy, or all are sampled."""

    def __init__(
        self, rows: Sequence[Row], request: Any = None, context: Context | None = None
    ) -> None:
        """Read the prompts of the first rows, and run rounds until others can join them.

        These rounds are in `rows` already. `request` is that of several rows, see
        `mmspec.targets.tokens.merge`; `context` that of a prompt that was read in chunks. Raises
        what the prompts raise.
        """
        self.rows = list(rows)
        parts = rows[0].call.parts
        self.stops = RowStops([cast(Stop, row.call.parts.stop) for row in rows])
        own = Parts(parts.target, parts.drafter, parts.verifier, self.stops, parts.gate)
        first = rows[0].call.request if request is None else request
        self.running = Running(own, first, context)
        while not (self._is_joinable or all(row.is_finished for row in self.rows)):
            self.step()
        if len(rows) > 1 and self._is_joinable:
            self.running.context = drop_padding(self._context)

    @property
    def _context(self) -> Context:
        return cast(Context, self.running.context)

    @property
    def _is_joinable(self) -> bool:
        context = self._context
        return context.scores is None and isinstance(context.memory, Memory | RowMemories)

    @property
    def has_drafter(self) -> bool:
        """Whether its drafter still works; a batch whose drafter failed takes no further rows."""
        return self.running.drafter.drafter is not None

    def step(self) -> Round:
        """Run one round. Rows that ended in it stay until `drop_finished`."""
        round_ = self.running.step()
        for index, row in enumerate(self.rows):
            row.error = row.error or _error_of_row(self.stops.errors[index], row)
            row.read(round_, index, self.running.scores)
        self.running.clock.resume()
        return round_

    def join(self, other: RowBatch) -> None:
        """Take the rows of another batch. Raises CannotJoin before anything is changed."""
        if not (self.has_drafter and other.has_drafter):
            raise CannotJoin("the drafter of one of these batches failed")
        running, theirs = self.running, other.running
        shift = running.index - theirs.index
        running.context = join_contexts(
            self._context, other._context, shift, lambda: self._join_drafters(other)
        )
        self.stops.join(other.stops)
        for row in other.rows:
            row.start += shift
        self.rows += other.rows

    def _join_drafters(self, other: RowBatch) -> None:
        ours, theirs = self.running.drafter, other.running.drafter
        join_states(ours.drafter, ours.state, theirs.state)

    def drop(self, row: Row) -> None:
        """Remove a row between rounds."""
        index = self.rows.index(row)
        if len(self.rows) > 1:
            self.running.context = drop_context_row(self._context, index)
            guarded = self.running.drafter
            if guarded.state is not None:
                guarded.state.drop(index)
            self.stops.drop(index)
        swap_out(self.rows, index)

    def drop_finished(self) -> list[Row]:
        """Remove the rows that have ended, and return them."""
        ended = [row for row in self.rows if row.is_finished]
        for row in ended:
            self.drop(row)
        return ended


def slice_round(round_: Round, row: int, start: int) -> Round:
    """The round of one row of a batch, counted from its own round 0, which is round `start`."""
    one = slice(row, row + 1)
    verdict = round_.verdict
    return replace(
        round_,
        index=round_.index - start,
        drafted=round_.drafted[one],
        accepted=round_.accepted[one],
        path=round_.path[one],
        takes_next=round_.takes_next[one],
        tokens=round_.tokens[one],
        finished=round_.finished[one],
        excess=None if round_.excess is None else round_.excess[one],
        verdict=replace(
            verdict,
            path=verdict.path[one],
            length=verdict.length[one],
            next=None if verdict.next is None else verdict.next[one],
            excess=None if verdict.excess is None else verdict.excess[one],
            replacements=None if verdict.replacements is None else verdict.replacements[one],
            resample_mask=None if verdict.resample_mask is None else verdict.resample_mask[one],
        ),
    )


def rank_tokens(scores: torch.Tensor, tokens: Any, count: int) -> TokenScores:  # (n, V), n ids
    """The log-probability of each token, and the `count` likeliest ones at its position."""
    log_probs = scores.log_softmax(-1)
    own = log_probs.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    best = log_probs.topk(min(count, scores.shape[-1]), -1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        (value, list(zip(ids, values, strict=True)))
        for value, (ids, values) in zip(own, rows, strict=True)
    ]


def _error_of_row(error: Exception | None, row: Row) -> Exception | None:
    """An error that holds the tokens of this row alone, not those of other requests."""
    if isinstance(error, BrokenLogits):
        return BrokenLogits(str(error), error.round_index - row.start, [list(row.tokens)])
    return error
