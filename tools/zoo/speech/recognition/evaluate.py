"""Word error rates of recognisers, and acceptance lengths of draft models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jiwer import process_words

from mmspec.api import accelerate


@dataclass(frozen=True)
class WordErrors:
    """Substitutions, deletions and insertions, and the number of reference words."""

    wrong: int
    total: int

    @property
    def rate(self) -> float:
        return self.wrong / self.total


def word_errors(references: Sequence[str], transcripts: Sequence[str]) -> WordErrors:
    """Word errors over all pairs. References must have words."""
    found = process_words(list(references), list(transcripts))
    wrong = found.substitutions + found.deletions + found.insertions
    return WordErrors(wrong, found.hits + found.substitutions + found.deletions)


def acceptance(
    target: Any, recipe: str, drafter: Any, inputs: Sequence[dict[str, Any]], drafted: int
) -> float:
    """Tokens per round of greedy chain speculation with `drafted` tokens."""
    fast = accelerate(target, recipe, drafter=drafter, length=drafted)
    made = [fast.generate(**one, do_sample=False).stats for one in inputs]
    accepted = sum(stats.num_accepted_draft_tokens for stats in made)
    length: float = 1 + accepted / max(sum(stats.num_spec_steps for stats in made), 1)
    return round(length, 2)
