"""Cascades: every model drafts with the help of a smaller one, whose tokens it verifies.

    target      verifies  a b c d     drawn from q1, the distributions of the middle model
    middle      verifies  a b | c d   drawn from those of the smaller one
    small       draws     a b   c d

A token that the target sees has exactly the distribution q1, however it was found: by an accepted
draft, a correction or a bonus. So the target's verdict needs q1 alone, and stays exact for any
number of levels. The innermost level is a draft model, or a search in the text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec._attributes import delegate_to
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane
from mmspec.draft import Draft, Kind, Round, Scores
from mmspec.drafters.draft_model import DraftModel, DraftUpdate, MultiKindDrafter
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.drafters.lookup.text_index import NGramIndex, copy_tokens
from mmspec.drafters.neural.stem import Rows, Stem
from mmspec.errors import check_number
from mmspec.targets.rows import join_states, swap_out
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class Search:
    """The innermost level of a cascade: copies what followed the last tokens in the text."""

    longest: int = 3
    ignore: frozenset[int] = frozenset()

    def index(self) -> NGramIndex:
        return NGramIndex(self.longest, self.ignore)


@dataclass(frozen=True)
class Nested(MultiKindDrafter):
    """A chain drafted by the first of `models` with the help of the others (CS-Drafting, TriForce).

    `lengths[i]` tokens are drafted by level i for the level above it: the first entry is the length
    of the target's draft, the last one that of the innermost level, a `search` where there is one.
    After them the search alone drafts `tail` tokens (horizontal cascade). A level accepts
    what it draws itself with the noise of the position, which all levels share: the target's own
    for RACE proposals, that of the round for IID ones. So tokens are those that the first model
    would have drawn alone. Exact with every lossless verifier.

    Raises ValueError for lengths that are not one per level.
    """

    models: tuple[DraftModel, ...]
    lengths: tuple[int, ...]
    search: Search | None = None
    tail: int = 0
    kind: Kind | None = None

    sees = delegate_to("first.sees")

    def __post_init__(self) -> None:
        levels = len(self.models) + (self.search is not None)
        if len(self.lengths) != levels:
            raise ValueError(
                f"{len(self.lengths)} lengths are given for {levels} levels; give one per level, "
                "from the tokens of the target's draft to those of the innermost level"
            )
        for count in self.lengths:
            check_number("length of a level", count, 1, whole=True, example=4)
        check_number("tail", self.tail, 0, whole=True, example=10)

    @property
    def first(self) -> DraftModel:
        return self.models[0]

    @property
    def choices(self) -> tuple[Kind, ...]:
        return (Kind.RACE, Kind.IID)

    @property
    def required_features(self) -> frozenset[str]:
        return frozenset().union(*(model.required_features for model in self.models))

    @property
    def reads_prompt(self) -> bool:
        return any(model.reads_prompt for model in self.models)

    def begin(self, context: Context) -> NestedState:
        indexes = [] if self.search is None else [self.search.index() for _ in context.history]
        return NestedState([model.begin(context) for model in self.models], indexes)

    def cache_bytes(self, state: NestedState) -> int | None:
        sizes = [
            model.cache_bytes(one) for model, one in zip(self.models, state.models, strict=True)
        ]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def propose(self, context: Context, state: NestedState) -> Draft:
        budget = min(self.lengths[0], max_useful_length(context))
        work = NestedRound(self, context, state)
        state.stems, state.drafted = work.stems, []
        if not budget:
            return context.empty_draft()
        active = [not finished for finished in context.finished]
        rows: Rows = [[] for _ in context.history]
        rows = work.extend(0, rows, budget, active)
        state.drafted = rows
        room = max_useful_length(context) - budget
        tail = work.search(rows, min(self.tail, room), active) if self.search is not None else rows
        tokens, mask = pad(context, tail)
        if self.kinds[0] is Kind.RACE:
            return Draft.chain(tokens, Kind.RACE, mask=mask)
        q = work.stems[0].after([0] * context.batch, budget)
        if tokens.shape[1] > budget:
            copied = tokens[:, budget:, None]
            point = q.probs.new_zeros(*copied.shape[:2], q.size).scatter_(-1, copied, 1)
            q = Categorical.from_probs(torch.cat((q.probs, point), 1))
        return Draft.chain(tokens, Kind.IID, q, mask)

    def observe(
        self, context: Context, state: NestedState, draft: Draft, scores: Scores, round_: Round
    ) -> NestedState:
        for level, (model, stem) in enumerate(zip(self.models, state.stems, strict=True)):
            if not stem.is_read:
                continue
            read = stem.columns_of(state.drafted, round_.accepted)
            found = (draft, scores, round_, read, stem.num_columns, stem.distributions)
            state.models[level] = model.keep(context, state.models[level], DraftUpdate(*found))
        state.stems = []
        return state


class NestedRound:
    """One round of a cascade."""

    def __init__(self, cascade: Nested, context: Context, state: NestedState) -> None:
        self.cascade, self.context, self.indexes = cascade, context, state.indexes
        pairs = zip(cascade.models, state.models, strict=True)
        self.stems = [Stem(model, context, own) for model, own in pairs]

    def extend(self, level: int, rows: Rows, count: int, active: Sequence[bool]) -> Rows:
        """The active rows with `count` more tokens of that level."""
        if level == len(self.stems):
            return self.search(rows, count, active)
        if level + 1 == len(self.cascade.lengths):
            return self.sample(level, rows, count, active)
        goals = [len(row) + count * on for row, on in zip(rows, active, strict=True)]
        rows = [list(row) for row in rows]
        while True:
            short = [len(row) < goal for row, goal in zip(rows, goals, strict=True)]
            if not any(short):
                return [row[:goal] for row, goal in zip(rows, goals, strict=True)]
            guess = self.extend(level + 1, rows, self.cascade.lengths[level + 1], short)
            for row, new in zip(rows, self.verify(level, rows, guess), strict=True):
                row += new
            rows = [row[:goal] for row, goal in zip(rows, goals, strict=True)]

    def verify(self, level: int, rows: Rows, guess: Rows) -> Rows:
        """What the level accepts of the tokens of `guess` after `rows`, and one more per row."""
        stem, context = self.stems[level], self.context
        stem.read(guess)
        starts = [len(row) for row in rows]
        tokens, mask = pad(context, [new[at:] for new, at in zip(guess, starts, strict=True)])
        width = tokens.shape[1]
        own = self.draw(stem.after(starts, width + 1), starts)
        hits = own[:, :width] == tokens
        length = (hits if mask is None else hits & mask).cumprod(-1).sum(-1, keepdim=True)
        found = torch.cat((length, own.gather(1, length)), 1).tolist()
        return [
            [*new[at : at + count], last]
            for new, at, (count, last) in zip(guess, starts, found, strict=True)
        ]

    def sample(self, level: int, rows: Rows, count: int, active: Sequence[bool]) -> Rows:
        """Draw from the innermost model, token by token."""
        stem, rows = self.stems[level], [list(row) for row in rows]
        for _ in range(count):
            stem.read(rows)
            starts = [len(row) for row in rows]
            drawn = self.draw(stem.after(starts, 1), starts)
            for row, on, token in zip(rows, active, drawn.flatten().tolist(), strict=True):
                row += [token] * on
        return rows

    def search(self, rows: Rows, count: int, active: Sequence[bool]) -> Rows:
        """The active rows with up to `count` tokens copied from their text."""
        assert self.cascade.search is not None
        found: Rows = []
        for row, text, index, on in zip(
            rows, self.context.history, self.indexes, active, strict=True
        ):
            index.read(text)
            place = index.find([*text[-index.longest :], *row]) if on and count else None
            copied = [] if place is None else text[place : place + count]
            if place is not None and place + count > len(text):
                copied += row
            start = None if place is None else 0
            ignore = self.cascade.search.ignore
            found.append([*row, *copy_tokens(copied, start, count, ignore)])
        return found

    def draw(self, q: Categorical, starts: Sequence[int]) -> Tensor:  # (B, n)
        """Tokens of `q` (B, n) after `starts[b]` tokens, with the noise of their positions."""
        context = self.context
        if q.hard:
            return q.mode
        steps = torch.tensor(starts, device=context.device)[:, None]
        steps = steps + torch.arange(q.batch[1], device=context.device)
        if self.cascade.kinds[0] is Kind.RACE:
            return q.sample(context.noise.shared_keys(context.position() + steps))
        return q.sample(context.noise.fresh_keys(Lane.DRAFT, steps))


@dataclass
class NestedState:
    """The states of the models, and what they have read in this round."""

    models: list[Any]
    indexes: list[NGramIndex]
    stems: list[Stem] = field(default_factory=list)
    drafted: Rows = field(default_factory=list)

    def join(self, other: NestedState) -> None:
        """Append the rows of another request."""
        for one, theirs in zip(self.models, other.models, strict=True):
            join_states(self, one, theirs)
        self.indexes += other.indexes

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        for one in self.models:
            if one is not None:
                one.drop(row)
        if self.indexes:
            swap_out(self.indexes, row)


def pad(context: Context, rows: Rows) -> tuple[Tensor, Tensor | None]:  # (B, N) x2
    """Rows as a tensor, and the mask of those that are shorter, if any."""
    width = max(map(len, rows))
    lasts = [text[-1] for text in context.history]  # always readable
    filled = [[*row, *[last] * (width - len(row))] for row, last in zip(rows, lasts, strict=True)]
    tokens = torch.tensor(filled, dtype=torch.int64, device=context.device).view(len(rows), width)
    if all(len(row) == width for row in rows):
        return tokens, None
    sizes = torch.tensor([[len(row)] for row in rows], device=context.device)
    return tokens, torch.arange(width, device=context.device) < sizes
