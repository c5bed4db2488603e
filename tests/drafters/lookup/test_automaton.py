"""The suffix automaton finds what a search over all suffixes finds."""

from __future__ import annotations

import pytest
import torch

from mmspec.drafters.lookup.automaton import Automaton
from tests.covering import covering


@pytest.mark.parametrize(
    ("symbols", "ignore", "seed"), covering([2, 3, 6], [(), (0,)], range(4), strength=1)
)
def test_it_finds_the_longest_repeated_suffix(
    symbols: int, ignore: tuple[int, ...], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, symbols, (120,), generator=generator).tolist()
    automaton = Automaton(ignore)
    for end in range(1, len(text) + 1):
        automaton.read(text[:end])
        size = _longest(text[:end], ignore)
        assert automaton.matched == size
        if size:
            place = automaton.place
            assert place is not None
            assert place < end
            assert text[place - size : place] == text[end - size : end]


def _longest(text: list[int], ignore: tuple[int, ...]) -> int:
    for size in range(len(text) - 1, 0, -1):
        tail = text[-size:]
        if not set(tail) & set(ignore) and any(
            text[start : start + size] == tail for start in range(len(text) - size)
        ):
            return size
    return 0


def test_it_has_at_most_two_states_per_token() -> None:
    automaton = Automaton()
    automaton.read([1] + [2, 3] * 500)
    assert len(automaton._size) <= 2 * 1001


def test_it_copies_from_the_latest_place_that_was_noticed() -> None:
    """(1, 2) was followed by 3, then by 4, then by 5: every time it is noticed the place moves."""
    automaton, places = Automaton(), []
    text = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]
    for end in range(1, len(text) + 1):
        automaton.read(text[:end])
        if automaton.matched == 2:
            places.append(automaton.place)
    assert places == [2, 5, 8]
