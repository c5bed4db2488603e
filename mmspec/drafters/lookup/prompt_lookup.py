"""Prompt lookup: propose what followed the last few tokens earlier in the text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.goodput import parse
from mmspec.drafters.lengths.length import Length
from mmspec.drafters.lookup.text_index import Index, NGramIndex, copy_tokens
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Kit
from mmspec.targets.rows import swap_out
from mmspec.targets.tokens.context import Context


class CopyDrafter(Drafter):
    """Copies from an earlier position of the text.

    Token ids in `ignore` (image placeholders) are never matched and end a copy. `length` is a
    number or a policy; policies that need the drafter's distribution have none here and draft their
    `max_length`.
    """

    kinds: tuple[Kind, ...] = (Kind.DET,)

    def __init__(self, length: int | str | Length, ignore: Collection[int]) -> None:
        self.length = parse(length)
        self.ignore = frozenset(ignore)

    @abstractmethod
    def index(self) -> Index:
        """Create the index of one row."""

    def begin(self, context: Context) -> LookupState:
        return LookupState(self.length.begin(), [self.index() for _ in range(context.batch)])

    def propose(self, context: Context, state: LookupState) -> Draft:
        budget = self.length.budget(state.length, context)
        copies: list[list[int]] = []
        for row, index in enumerate(state.rows):
            text = context.history[row]
            index.read(text)
            is_drafted = budget and not context.finished[row]
            copies.append(
                copy_tokens(text, index.find(text), budget, self.ignore) if is_drafted else []
            )
        return pad_chains(context, copies)

    def observe(
        self, context: Context, state: LookupState, draft: Draft, scores: Scores, round_: Round
    ) -> LookupState:
        state.length = self.length.observe(state.length, round_)
        return state


@dataclass
class LookupState:
    """The state of a request."""

    length: Any
    rows: list[Index]

    def join(self, other: LookupState) -> None:
        """Append the rows of another request; the draft length stays that of the batch."""
        self.rows += other.rows

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        swap_out(self.rows, row)


class PromptLookup(CopyDrafter):
    """Match the last n tokens, n = `longest` .. 1, and copy what followed (Saxena 2023).

    The most recent earlier occurrence counts. A copy that reaches the end of the text continues
    with its own first tokens, so loops are continued.
    """

    def __init__(
        self, length: int | str | Length = 10, longest: int = 3, ignore: Collection[int] = ()
    ) -> None:
        if longest < 1:
            raise ValueError(f"longest={longest} leaves nothing to match; give 1 or more tokens")
        super().__init__(length, ignore)
        self.longest = longest

    def index(self) -> NGramIndex:
        return NGramIndex(self.longest, self.ignore)


def pad_chains(context: Context, rows: Sequence[Sequence[int]]) -> Draft:
    """Pad proposals of different lengths to one draft; the mask excludes the padding."""
    width = max((len(row) for row in rows), default=0)
    if not width:
        return Draft.empty(context.batch, context.device)
    # the target reads the padding too; a token of the text is always readable
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
    """Copies of earlier text."""
    return PromptLookup(length_of(kit), kit.options["longest"], kit.target.visual_ids)


def length_of(kit: Kit) -> Length:
    if not isinstance(kit.shape, Chain):
        raise ValueError("this recipe drafts chains; give length= instead of tree=")
    return kit.shape.length
