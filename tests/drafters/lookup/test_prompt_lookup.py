"""Prompt lookup copies what followed the same tokens earlier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mmspec.draft import Kind
from mmspec.drafters.lengths.length import Entropy
from mmspec.drafters.lookup.prompt_lookup import PromptLookup
from tests.covering import covering
from tests.drafters.driving import context, count_accepted, drive, greedy, inputs, tiny


def test_it_continues_the_earlier_occurrence() -> None:
    drafter, now = PromptLookup(length=4), context([1, 2, 3, 9, 1, 2])
    draft = drafter.propose(now, drafter.begin(now))
    assert draft.tokens.tolist() == [[3, 9, 1, 2]]
    assert draft.kind is Kind.DET
    assert draft.is_chain
    assert not draft.padded


def test_the_longest_match_wins_and_then_the_latest() -> None:
    text = [1, 2, 3, 4, 5, 2, 3, 6, 9, 2, 3, 7, 1, 2, 3]  # (1, 2, 3) -> 4, (2, 3) -> 7
    drafter, now = PromptLookup(length=1), context(text)
    assert drafter.propose(now, drafter.begin(now)).tokens.tolist() == [[4]]
    drafter = PromptLookup(length=1, longest=2)
    assert drafter.propose(now, drafter.begin(now)).tokens.tolist() == [[7]]


def test_a_loop_is_continued_behind_the_end_of_the_text() -> None:
    drafter, now = PromptLookup(length=7), context([5, 6, 7, 5, 6, 7])
    assert drafter.propose(now, drafter.begin(now)).tokens.tolist() == [[5, 6, 7, 5, 6, 7, 5]]


def test_rows_without_a_match_are_masked_and_no_match_at_all_is_empty() -> None:
    drafter, now = PromptLookup(length=3), context([1, 2, 3, 9, 1, 2], [1, 2, 3, 4], [7, 7])
    draft = drafter.propose(now, drafter.begin(now))
    assert draft.mask.tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert draft.tokens.tolist() == [[3, 9, 1], [4, 4, 4], [7, 7, 7]]
    now = context([1, 2, 3, 4], [5])
    assert drafter.propose(now, drafter.begin(now)).nodes == 0


def test_finished_rows_and_spent_room_propose_nothing() -> None:
    drafter, now = PromptLookup(length=3), context([4, 4, 4], [4, 4, 4], room=3)
    state = drafter.begin(now)
    assert drafter.propose(now, state).nodes == 2  # the third token is the target's own
    half = replace(now, finished=(True, False))
    assert drafter.propose(half, state).mask.tolist() == [[False, False], [True, True]]
    assert (
        drafter.propose(replace(now, request=replace(now.request, max_new_tokens=1)), state).nodes
        == 0
    )


def test_ignored_ids_are_neither_matched_nor_proposed() -> None:
    image = 99
    drafter = PromptLookup(length=4, ignore=(image,))
    now = context([1, 2, image, image, image, 3, 4, image, 5, 3, 4], vocabulary=100)
    assert drafter.propose(now, drafter.begin(now)).nodes == 0  # only an image ever followed 4
    now = context([1, 2, 3, image, image, 1, 2], vocabulary=100)
    assert drafter.propose(now, drafter.begin(now)).tokens.tolist() == [[3]]
    now = context([1, image, image], vocabulary=100)
    assert drafter.propose(now, drafter.begin(now)).nodes == 0


@pytest.mark.parametrize(
    ("padding", "length"),
    covering([(0,), (0, 3, 5)], [5, "auto", Entropy(max_length=4)], strength=1),
    ids=repr,
)
def test_greedy_decoding_is_unchanged_and_shorter(padding: tuple[int, ...], length: Any) -> None:
    model, prompt = tiny(), inputs(padding)
    text, rounds = drive(model, PromptLookup(length), prompt, room=40)
    assert text == greedy(model, prompt, 40)
    if length == "auto":  # it may find drafting too slow on this machine
        return
    assert count_accepted(rounds) > 0
    assert len(rounds) < 40


def test_sampling_is_that_of_plain_decoding() -> None:
    model, prompt = tiny(), inputs((0, 2))
    hot = {"do_sample": True, "temperature": 0.7}
    plain, _ = drive(model, PromptLookup(0), prompt, 30, **hot)
    assert drive(model, PromptLookup(4, longest=1), prompt, 30, **hot)[0] == plain


def test_nothing_to_match_is_refused() -> None:
    with pytest.raises(ValueError, match="longest=0"):
        PromptLookup(longest=0)
