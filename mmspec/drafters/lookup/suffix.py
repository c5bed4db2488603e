"""Suffix automaton: copy what followed the longest repeated suffix of the text."""

from __future__ import annotations

from collections.abc import Collection

from mmspec.draft import Drafter
from mmspec.drafters.lengths.length import Length
from mmspec.drafters.lookup.automaton import Automaton
from mmspec.drafters.lookup.prompt_lookup import CopyDrafter, length_of
from mmspec.recipe import Kit


class SuffixAutomaton(CopyDrafter):
    """Copy from the last occurrence of the longest repeated suffix (SAM Decoding, Hu et al. 2024).

    Each token is read once, in amortised constant time. Suffixes shorter than `shortest` tokens are
    ignored. The copy starts at the most recently recorded occurrence of the suffix.
    """

    def __init__(
        self, length: int | str | Length = 10, shortest: int = 2, ignore: Collection[int] = ()
    ) -> None:
        if shortest < 1:
            raise ValueError(f"shortest={shortest} would copy without a match; give 1 or more")
        super().__init__(length, ignore)
        self.shortest = shortest

    def index(self) -> Automaton:
        return Automaton(self.ignore, self.shortest)


def suffix_automaton(kit: Kit) -> Drafter:
    """Copies after the longest repeated suffix."""
    return SuffixAutomaton(length_of(kit), kit.options["shortest"], kit.target.visual_ids)
