"""Indexes of one growing text, and copies from it.

Standard library alone: engines with another version of transformers import this file as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Index(Protocol):
    """An index of one row's growing text."""

    def read(self, text: Sequence[int]) -> None:
        """Add the tokens since the last call."""

    def find(self, text: Sequence[int]) -> int | None:
        """The position to copy from, if there is one."""


@dataclass
class NGramIndex:
    """Position after the last occurrence of each n-gram of a text; reads each token once."""

    longest: int
    ignore: frozenset[int] = frozenset()
    num_read: int = 0
    places: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> position after it

    def read(self, text: Sequence[int]) -> None:
        """Add the tokens since the last call."""
        for place in range(max(self.num_read, 1), len(text)):
            if text[place] in self.ignore:
                continue
            for size in range(1, min(self.longest, place) + 1):
                if text[place - size] in self.ignore:
                    break
                self.places[tuple(text[place - size : place])] = place
        self.num_read = len(text)

    def find(self, text: Sequence[int]) -> int | None:
        """Position after an earlier occurrence of the longest known n-gram at the end."""
        for size in range(min(self.longest, len(text)), 0, -1):
            place = self.places.get(tuple(text[-size:]))
            if place is not None:
                return place
        return None


def copy_tokens(
    text: Sequence[int], place: int | None, length: int, ignore: Collection[int]
) -> list[int]:
    """Copy up to `length` tokens from `place`; past the end of the text the copy repeats itself."""
    copied: list[int] = []
    if place is None:
        return copied
    for offset in range(place, place + length):
        token = text[offset] if offset < len(text) else copied[offset - len(text)]
        if token in ignore:
            break
        copied.append(token)
    return copied
