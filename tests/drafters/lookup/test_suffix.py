"""Copies continue the longest repeated suffix."""

from __future__ import annotations

import pytest

from mmspec.drafters.lookup.suffix import SuffixAutomaton
from tests.drafters.driving import context, count_accepted, drive, greedy, inputs, tiny


def test_it_continues_the_longest_match() -> None:
    # (1, 2) was followed by 5 most recently, but (8, 1, 2) only ever by 3
    drafter, now = SuffixAutomaton(length=2), context([8, 1, 2, 3, 1, 2, 5, 8, 1, 2])
    assert drafter.propose(now, drafter.begin(now)).tokens.tolist() == [[3, 1]]


def test_short_matches_do_not_count() -> None:
    now = context([1, 2, 3, 1])
    for shortest, nodes in ((1, 10), (2, 0)):
        drafter = SuffixAutomaton(shortest=shortest)
        assert drafter.propose(now, drafter.begin(now)).nodes == nodes
    with pytest.raises(ValueError, match="shortest=0"):
        SuffixAutomaton(shortest=0)


def test_short_rows_are_masked_not_filled() -> None:
    drafter = SuffixAutomaton(length=3, ignore=(9,))
    now = context([4, 5, 6, 7, 4, 5], [4, 5, 6, 9, 4, 5], [1, 2, 3, 4])
    draft = drafter.propose(now, drafter.begin(now))
    assert draft.mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert draft.tokens[draft.mask].tolist() == [6, 7, 4, 6]


@pytest.mark.parametrize("padding", [(0,), (0, 3, 5)])
@pytest.mark.parametrize("length", [6, "heuristic"])
def test_greedy_decoding_is_unchanged_and_shorter(
    padding: tuple[int, ...], length: int | str
) -> None:
    model, prompt = tiny(), inputs(padding)
    text, rounds = drive(model, SuffixAutomaton(length), prompt, room=40)
    assert text == greedy(model, prompt, 40)
    assert count_accepted(rounds) > 0
    assert len(rounds) < 40
