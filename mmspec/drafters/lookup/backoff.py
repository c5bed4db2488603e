"""ANPD: an n-gram model of the text drafts token by token, backing off to shorter n-grams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from mmspec.draft import Draft, Kind
from mmspec.drafters.lengths.length import Length
from mmspec.drafters.lookup.prompt_lookup import CopyDrafter, LookupState, length_of, pad_chains
from mmspec.drafters.lookup.text_index import Index
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context


@dataclass
class NGramCounts:
    """What followed each sequence of up to `longest` - 1 tokens, and how often."""

    longest: int
    ignore: frozenset[int] = frozenset()
    num_read: int = 0
    counts: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)

    def read(self, text: Sequence[int]) -> None:
        """Add the tokens since the last call."""
        for place in range(max(self.num_read, 1), len(text)):
            token = text[place]
            if token in self.ignore:
                continue
            for size in range(1, min(self.longest - 1, place) + 1):
                if text[place - size] in self.ignore:
                    break
                known = self.counts.setdefault(tuple(text[place - size : place]), {})
                known[token] = known.pop(token, 0) + 1  # of equal counts the most recent is last
        self.num_read = len(text)

    def find(self, text: Sequence[int]) -> int | None:
        """The most frequent token after the longest known sequence at the end; None = unknown."""
        for size in range(min(self.longest - 1, len(text)), 0, -1):
            known = self.counts.get(tuple(text[-size:]))
            if known is not None:
                most = max(known.values())
                return next(token for token in reversed(known) if known[token] == most)
        return None


class BackoffDrafter(CopyDrafter):
    """Generates a draft from n-grams of prompt and output, longest first (ANPD, Ou et al. 2024).

    `longest` is N: up to N - 1 tokens predict the next one, fewer where they are unknown. Of tokens
    that followed equally often the most recent one is drafted. Exact with every lossless verifier.
    """

    kinds: tuple[Kind, ...] = (Kind.DET,)

    def __init__(
        self, length: int | str | Length = 7, longest: int = 5, ignore: Collection[int] = ()
    ) -> None:
        check_number("longest", longest, 2, whole=True, example=5)
        super().__init__(length, ignore)
        self.longest = longest

    def index(self) -> Index:
        return NGramCounts(self.longest, self.ignore)

    def propose(self, context: Context, state: LookupState) -> Draft:
        budget = self.length.budget(state.length, context)
        drafts: list[list[int]] = []
        for index, text, done in zip(state.rows, context.history, context.finished, strict=True):
            index.read(text)
            tail, drafted = text[-self.longest :], list[int]()
            while not done and len(drafted) < budget:
                token = index.find([*tail, *drafted])
                if token is None:
                    break
                drafted.append(token)
            drafts.append(drafted)
        return pad_chains(context, drafts)


def backoff(kit: Kit) -> BackoffDrafter:
    """An n-gram model of the text."""
    return BackoffDrafter(length_of(kit), kit.options["longest"], kit.target.visual_ids)
