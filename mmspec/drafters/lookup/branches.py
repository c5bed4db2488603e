"""Guesses for the next token, and retrieved continuations below each of them.

text    ... the cat sat on the     guesses for the next token    cat  mat  hat
draft   cat - sat - on             what followed "the cat"
        mat                        "the mat" is new: the guess alone
        hat - on - fire            what followed "hat"
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from mmspec.distributions.categorical import as_categorical
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.drafters.lookup.retrieved_tree import merge_branches, nodes_of, pad_trees
from mmspec.drafters.lookup.text_index import NGramIndex, copy_tokens
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.targets.rows import swap_out
from mmspec.targets.tokens.context import Context

STORED = 16  # last tokens of a text that stores are searched for


@dataclass
class RowGuesses:
    """The text of a row, and the target's candidates."""

    index: NGramIndex
    last: list[int] = field(default_factory=list)  # runners-up of the last committed token
    after: dict[int, list[int]] = field(default_factory=dict)  # candidates last seen after a token


class Guesses(Protocol):
    """Where guesses for the next token come from."""

    @property
    def reads_scores(self) -> bool:
        """Whether they depend on the scores of earlier rounds."""

    def tokens(self, row: RowGuesses, text: list[int]) -> list[int]: ...


@dataclass(frozen=True)
class LastLogits:
    """The runners-up of the last token: often the tokens after it (LogitSpec, 2025)."""

    reads_scores: ClassVar[bool] = True

    def tokens(self, row: RowGuesses, text: list[int]) -> list[int]:
        return row.last


@dataclass(frozen=True)
class Candidates:
    """What the target found likely the last time after this token (READER, 2025)."""

    reads_scores: ClassVar[bool] = True

    def tokens(self, row: RowGuesses, text: list[int]) -> list[int]:
        return row.after.get(text[-1], [])


@dataclass(frozen=True)
class BranchedLookup(Drafter):
    """Copies after the text and after each of `width` guesses, merged to a tree of `nodes`.

    A branch is a guess and up to `length` tokens that followed it: after the longest n-gram of up
    to `longest` tokens that ends with the guess, or from `stores` where the text has none. The copy
    without a guess comes first. Exact with every lossless verifier. Token ids in `ignore` (image
    placeholders) are not copied.
    """

    guesses: Guesses
    nodes: int = 48
    width: int = 8
    length: int = 6
    longest: int = 3
    ignore: Collection[int] = frozenset()
    stores: Callable[[Sequence[int], int], list[int]] | None = None  # of a text, at most so many
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    uses_trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("nodes", "width", "length", "longest"):
            check_number(name, getattr(self, name), 1, whole=True, example=8)

    def begin(self, context: Context) -> BranchState:
        ignore = frozenset(self.ignore)
        return BranchState(
            [RowGuesses(NGramIndex(self.longest, ignore)) for _ in range(context.batch)]
        )

    def propose(self, context: Context, state: BranchState) -> Draft:
        room = max_useful_length(context)
        found = []
        for row, text, done in zip(state.rows, context.history, context.finished, strict=True):
            row.index.read(text)
            branches = [] if done or not room else self._branches(row, text)
            found.append(merge_branches(branches, self.nodes, room))
        return pad_trees(context, found, min(room, self.nodes))

    def observe(
        self, context: Context, state: BranchState, draft: Draft, scores: Scores, round_: Round
    ) -> BranchState:
        """Keep the best tokens after the committed ones, read in one transfer."""
        if not self.guesses.reads_scores:
            return state
        width = min(self.width + 1, as_categorical(scores.distribution).size)
        best = as_categorical(scores.distribution).scores.topk(width, -1)
        tokens = best.indices.masked_fill(best.values.isneginf(), -1).tolist()
        for row, own, path, new, text in zip(
            state.rows, tokens, round_.path, round_.tokens, context.history, strict=True
        ):
            if not new:
                continue
            places = [0, *(node + 1 for node in path)][: len(new)]
            before = text[len(text) - len(new) - 1 : len(text) - 1]
            for place, token in zip(places, before, strict=True):
                row.after[token] = [one for one in own[place] if one >= 0]
            row.last = [one for one in own[places[-1]] if one not in (-1, new[-1])]
        return state

    def _branches(self, row: RowGuesses, text: list[int]) -> list[list[int]]:
        branches = [self._continue(row, text, [])]
        for guess in self.guesses.tokens(row, text)[: self.width]:
            if guess not in self.ignore:
                branches.append([guess, *self._continue(row, text, [guess])])
        return branches

    def _continue(self, row: RowGuesses, text: list[int], guess: list[int]) -> list[int]:
        """What followed the end of the text and a guess."""
        place = row.index.find([*text[-self.longest :], *guess])
        found = copy_tokens(text, place, self.length, self.ignore)
        if not found and self.stores is not None:
            stored = self.stores([*text[-STORED:], *guess], self.length)
            found = copy_tokens(stored, 0, len(stored), self.ignore)
        return found


@dataclass
class BranchState:
    """The state of a request."""

    rows: list[RowGuesses]

    def join(self, other: BranchState) -> None:
        """Append the rows of another request."""
        self.rows += other.rows

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        swap_out(self.rows, row)


def branches_of_logits(kit: Kit) -> Drafter:
    """Continuations of the runners-up of the last token."""
    return make_branches(kit, LastLogits())


def branches_of_candidates(kit: Kit) -> Drafter:
    """Continuations of the target's candidates after the last token."""
    return make_branches(kit, Candidates())


def make_branches(
    kit: Kit,
    guesses: Guesses,
    stores: Callable[[Sequence[int], int], list[int]] | None = None,
) -> BranchedLookup:
    """A lookup of the sizes that the recipe's options give. Raises ValueError for invalid ones."""
    sizes = {name: kit.options[name] for name in ("width", "length_of_branch", "longest")}
    length = sizes.pop("length_of_branch")
    check_number("length_of_branch", length, 1, whole=True, example=6)
    ignore = frozenset(kit.target.visual_ids)
    return BranchedLookup(
        guesses, nodes_of(kit), length=length, ignore=ignore, stores=stores, **sizes
    )
