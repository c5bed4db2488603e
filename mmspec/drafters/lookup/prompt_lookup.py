"""Prompt lookup: what followed the last few tokens earlier in the text probably follows again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.goodput import parse
from mmspec.drafters.lengths.length import Length
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context


class Index(Protocol):
    """What is known of one row's text, which only grows."""

    def read(self, text: Sequence[int]) -> None:
        """Take in the tokens since the last call."""

    def find(self, text: Sequence[int]) -> int | None:
        """The place to copy on from, if there is one."""


class Copying(Drafter):
    """Copies on from an earlier place of the text.

    Token ids in `ignore` (image placeholders) are never matched and end a copy. `length` is a
    number or a policy; policies that read the drafter's distribution find none here and draft to
    their
    `most`.
    """

    kinds: tuple[Kind, ...] = (Kind.DET,)

    def __init__(self, length: int | str | Length, ignore: Collection[int]) -> None:
        self.length = parse(length)
        self.ignore = frozenset(ignore)

    @abstractmethod
    def index(self) -> Index:
        """One for each row of a request."""

    def begin(self, context: Context) -> Lookup:
        return Lookup(self.length.begin(), [self.index() for _ in range(context.batch)])

    def propose(self, context: Context, state: Lookup) -> Draft:
        budget = self.length.budget(state.length, context)
        copies: list[list[int]] = []
        for row, index in enumerate(state.rows):
            text = context.history[row]
            index.read(text)
            wanted = budget and not context.finished[row]
            copies.append(copy(text, index.find(text), budget, self.ignore) if wanted else [])
        return ragged(context, copies)

    def observe(
        self, context: Context, state: Lookup, draft: Draft, scores: Scores, kept: Round
    ) -> Lookup:
        state.length = self.length.observe(state.length, kept)
        return state


@dataclass
class Lookup:
    """What is remembered of a request."""

    length: Any
    rows: Sequence[Index]


class PromptLookup(Copying):
    """Match the last n tokens, n = `longest` .. 1, and copy what followed (Saxena 2023).

    The most recent earlier occurrence counts. A copy that reaches the end of the text goes on with
    its own first tokens, so a loop is continued.
    """

    def __init__(
        self, length: int | str | Length = 10, longest: int = 3, ignore: Collection[int] = ()
    ) -> None:
        if longest < 1:
            raise ValueError(f"longest={longest} leaves nothing to match; give 1 or more tokens")
        super().__init__(length, ignore)
        self.longest = longest

    def index(self) -> Grams:
        return Grams(self.longest, self.ignore)


@dataclass
class Grams:
    """Where each n-gram of a growing text was last followed by something; reads each token once."""

    longest: int
    ignore: frozenset[int] = frozenset()
    seen: int = 0
    places: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> what followed it

    def read(self, text: Sequence[int]) -> None:
        """Take in the tokens since the last call."""
        for place in range(max(self.seen, 1), len(text)):
            if text[place] in self.ignore:
                continue
            for size in range(1, min(self.longest, place) + 1):
                if text[place - size] in self.ignore:
                    break
                self.places[tuple(text[place - size : place])] = place
        self.seen = len(text)

    def find(self, text: Sequence[int]) -> int | None:
        """The place behind an earlier occurrence of the longest known n-gram at the end."""
        for size in range(min(self.longest, len(text)), 0, -1):
            place = self.places.get(tuple(text[-size:]))
            if place is not None:
                return place
        return None


def copy(text: Sequence[int], place: int | None, length: int, ignore: Collection[int]) -> list[int]:
    """Up to `length` tokens from `place` on; behind the end of the text come the copied ones."""
    taken: list[int] = []
    if place is None:
        return taken
    for offset in range(place, place + length):
        token = text[offset] if offset < len(text) else taken[offset - len(text)]
        if token in ignore:
            break
        taken.append(token)
    return taken


def ragged(context: Context, rows: Sequence[Sequence[int]]) -> Draft:
    """Wrap proposals of different lengths as chains; the mask hides what fills up a shorter row."""
    width = max((len(row) for row in rows), default=0)
    if not width:
        return Draft.empty(context.batch, context.device)
    # The target reads the filling too, and a token of the text is one it can read.
    filled = [
        [*row, *(text[-1:] * (width - len(row)))]
        for row, text in zip(rows, context.history, strict=True)
    ]
    tokens = torch.tensor(filled, device=context.device)
    if all(len(row) == width for row in rows):
        return Draft.chain(tokens, Kind.DET)
    sizes = torch.tensor([[len(row)] for row in rows], device=context.device)
    return Draft.chain(tokens, Kind.DET, mask=torch.arange(width, device=context.device) < sizes)


def prompt_lookup(kit: Kit) -> Drafter:
    """Copies of the text so far."""
    return PromptLookup(length_of(kit), kit.options["longest"], kit.target.visual_ids)


def length_of(kit: Kit) -> Length:
    if not isinstance(kit.shape, Chain):
        raise ValueError("this recipe drafts chains; give length= instead of tree=")
    return kit.shape.length
