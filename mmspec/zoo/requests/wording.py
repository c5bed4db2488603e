"""Wordings of things, places and sizes: equal meanings, drawn at random.

A model that is trained on them has a distribution over wordings, as a large model has: plain
sampling is not deterministic, and a draft can be right about the picture and wrong about the word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmspec.zoo.scene import Thing

NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
)
_SIZES = {"small": ("small", "tiny", "little"), "large": ("large", "huge", "big")}
_CORNER = ("in the {} corner", "at the {}", "near the {} corner", "in the {} place")
_SIDE = ("at the {}", "on the {} side", "by the {} edge", "in the {} place")
_CENTER = ("in the {}", "in the very {}", "at the {}", "in the {} place")
_LEADS = ("", "", "then ", "also ", "next ", "here ", "further ", "so ")
_OPPOSITES = {
    **{"above": "below", "below": "above"},
    **{"to the left of": "to the right of", "to the right of": "to the left of"},
}


@dataclass(frozen=True)
class Wording:
    """Draws wordings with a generator."""

    generator: np.random.Generator

    def choose(self, *choices: str) -> str:
        """Draw one of the choices, each with the same probability."""
        return choices[self.generator.integers(len(choices))]

    def lead(self) -> str:
        """Draw the first word of a sentence, and a space; or nothing."""
        return self.choose(*_LEADS)

    def size(self, thing: Thing) -> str:
        """Word the size of a thing: "small", "tiny" or "little"."""
        return self.choose(*_SIZES[thing.size])

    def place(self, thing: Thing) -> str:
        """Word the place of a thing: "in the top left corner"."""
        words = thing.place
        forms = _CENTER if words == "center" else _CORNER if " " in words else _SIDE
        return self.choose(*forms).format(words)

    def noun(self, thing: Thing) -> str:
        """Return a noun phrase without an article: "huge red circle"."""
        return f"{self.size(thing)} {thing.colour} {thing.name}"

    def order(self, things: Sequence[Thing]) -> list[Thing]:
        """Put things in one of two orders: by rows, or by columns."""
        if self.generator.random() < 0.5:
            return sorted(things, key=lambda t: (t.row, t.column))
        return sorted(things, key=lambda t: (t.column, t.row))


def name_of(thing: Thing) -> str:
    """Name a thing by what no other thing of the scene has: "red circle"."""
    return f"{thing.colour} {thing.name}"


def relate(one: Thing, other: Thing) -> str:
    """Return where a thing is, seen from another; rows come before columns."""
    if one.row != other.row:
        return "above" if one.row < other.row else "below"
    return "to the left of" if one.column < other.column else "to the right of"


def negate(relation: str) -> str:
    """Return the opposite of a relation: "below" of "above"."""
    return _OPPOSITES[relation]


def count_things(number: int, noun: str = "thing") -> str:
    """Return a counted noun: "three things", "one thing"."""
    return f"{NUMBERS[number]} {noun if number == 1 else noun + 's'}"
