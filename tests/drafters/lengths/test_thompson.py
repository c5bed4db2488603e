"""Thompson sampling drafts more where more is accepted."""

from __future__ import annotations

from mmspec.drafters.lengths.goodput import parse
from mmspec.drafters.lengths.thompson import Thompson
from tests.drafters.driving import context
from tests.drafters.lengths.test_length import turn


def budgets(accepted: int, drafted: int, rounds: int = 30) -> list[int]:
    length, now = Thompson(max_length=6), context([1, 2], room=40)
    state, found = length.begin(), []
    for _ in range(rounds):
        state = length.observe(state, turn((accepted,), drafted))
        found.append(length.budget(state, now))
    return found


def test_lengths_follow_acceptance() -> None:
    good, bad = budgets(5, 6), budgets(0, 6)
    assert set(good[-10:]) == {6}
    assert set(bad[-10:]) == {1}
    assert budgets(1, 2) == budgets(1, 2)  # the same request drafts the same
    assert {*budgets(1, 2)} > {1, 2, 3}  # a sample for every token: neither none nor all


def test_it_is_known_by_name_and_never_drafts_too_much() -> None:
    length = parse("thompson")
    assert length == Thompson()
    assert length.budget(length.begin(), context([1], room=1)) == 0


def test_the_posterior_counts_tested_tokens() -> None:
    """2 of 4 accepted: the third was refused, the fourth not tested."""
    length = Thompson()
    state = length.observe(length.begin(), turn((2, 3), 4))
    assert (state.accepted, state.refused) == (1 + 2 + 3, 1 + 1 + 1)
    state = length.observe(state, turn((4,), 4))
    assert (state.accepted, state.refused) == (10, 3)  # nothing was refused
