"""Count the words that a recogniser gets wrong, and the tokens that a drafter gets right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jiwer import process_words

from mmspec.api import accelerate


@dataclass(frozen=True)
class WordErrors:
    """Words substituted, left out and put in, of so many that were said."""

    wrong: int
    said: int

    @property
    def rate(self) -> float:
        return self.wrong / self.said


def word_errors(said: Sequence[str], heard: Sequence[str]) -> WordErrors:
    """Over all pairs together. What was said must have words."""
    found = process_words(list(said), list(heard))
    wrong = found.substitutions + found.deletions + found.insertions
    return WordErrors(wrong, found.hits + found.substitutions + found.deletions)


def acceptance(
    target: Any, recipe: str, drafter: Any, inputs: Sequence[dict[str, Any]], drafted: int
) -> float:
    """Tokens per round of greedy chain speculation with so many drafted tokens."""
    fast = accelerate(target, recipe, drafter=drafter, length=drafted)
    made = [fast.generate(**one, do_sample=False).stats for one in inputs]
    accepted = sum(stats.num_accepted_draft_tokens for stats in made)
    length: float = 1 + accepted / max(sum(stats.num_spec_steps for stats in made), 1)
    return round(length, 2)
