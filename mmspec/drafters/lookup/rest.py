"""Retrieval-based drafts: what followed the last tokens in a datastore of texts (REST)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.length import Length
from mmspec.drafters.lookup.datastore import Datastore, check_lengths
from mmspec.drafters.lookup.prompt_lookup import length_of, pad_chains
from mmspec.drafters.lookup.text_index import copy_tokens
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context


class RetrievalDrafter(Drafter):
    """Drafts the most frequent continuation in a datastore, up to the draft length.

    Suffixes of `shortest` to `longest` tokens are looked up; tokens in `ignore` (image
    placeholders) end a draft. Deterministic proposals: exact with every lossless verifier. Where
    nothing matches, a plain step.
    """

    kinds: tuple[Kind, ...] = (Kind.DET,)

    def __init__(
        self,
        datastore: Datastore | None,
        length: Length,
        longest: int = 16,
        shortest: int = 2,
        ignore: Collection[int] = (),
    ) -> None:
        check_lengths(length.max_length, longest, shortest)
        self.datastore, self.length = datastore, length
        self.longest, self.shortest, self.ignore = longest, shortest, frozenset(ignore)

    def begin(self, context: Context) -> Any:
        return self.length.begin()

    def propose(self, context: Context, state: Any) -> Draft:
        budget = self.length.budget(state, context)
        drafts: list[list[int]] = [[] for _ in context.history]
        for row, text in enumerate(context.history):
            if self.datastore is not None and budget and not context.finished[row]:
                found = self.datastore.continuation(text, budget, self.longest, self.shortest)
                drafts[row] = copy_tokens(found, 0, len(found), self.ignore)
        return pad_chains(context, drafts)

    def observe(
        self, context: Context, state: Any, draft: Draft, scores: Scores, round_: Round
    ) -> Any:
        return self.length.observe(state, round_)


def rest(kit: Kit) -> Drafter:
    """A datastore of texts. Raises ValueError for other objects and other vocabularies."""
    given: Datastore | None = kit.load_option("datastore", Datastore)
    if given is not None:
        given.check_vocabulary(kit.target.vocabulary)
    options, ignore = kit.options, kit.target.visual_ids
    return RetrievalDrafter(given, length_of(kit), options["longest"], options["shortest"], ignore)
