"""Requests of six kinds: answers state their facts, and are as long as those of the benchmark."""

from __future__ import annotations

import re
from functools import cache

import pytest

from mmspec.zoo.facts import find_mentions
from mmspec.zoo.language import words
from mmspec.zoo.requests import (
    CATEGORIES,
    Request,
    is_trained_on_requests,
    request_words,
    requests,
    score_turn,
    write_scene_into_prompt,
)
from mmspec.zoo.requests.wording import NUMBERS
from mmspec.zoo.scene import COLOURS
from tests.covering import exhaustive

LENGTHS = {  # Shen et al. 2026: the last two there are 286 and 748
    "short-question": 47,
    "text": 63,
    "caption": 192,
    "chart": 69,
    "reasoning": 95,
    "conversation": 249,
}


@cache
def sample_requests(category: str) -> list[Request]:
    return requests(120, "held-out", seed=3, category=category)


@pytest.mark.parametrize("category", exhaustive(CATEGORIES, [*CATEGORIES][::2]))
def test_answers_state_their_facts_and_those_of_other_scenes_do_not(category: str) -> None:
    found = sample_requests(category)
    for one in found:
        for turn in one.turns:
            right, required = score_turn(one, turn, turn.answer)
            assert right == required > 0, (turn, one.scene.facts())
    shares = [
        score_turn(one, turn, wrong.answer)
        for one, other in zip(found, found[1:] + found[:1], strict=True)
        for turn, wrong in zip(one.turns, other.turns, strict=True)
    ]
    assert sum(right for right, _ in shares) < 0.75 * sum(required for _, required in shares)


@pytest.mark.parametrize("category", CATEGORIES)
def test_answers_are_as_long_as_those_of_the_benchmark(category: str) -> None:
    found = sample_requests(category)
    mean = sum(len(words(t.answer)) + 1 for one in found for t in one.turns) / len(found)
    assert mean == pytest.approx(LENGTHS[category], rel=0.12)


def test_counts_and_verdicts_are_those_of_the_scene() -> None:
    asked = 0
    for one in [*sample_requests("reasoning"), *sample_requests("short-question")]:
        turn = one.turns[0]
        final = dict(turn.facts)["final"]
        if counted := re.search(r"(?:many|the) (\w+) things", turn.prompt):
            word = counted.group(1)
            things = [t for t in one.scene.things if word in (t.colour, t.size)]
            if word in COLOURS or word in ("small", "large"):
                assert final == NUMBERS[len(things)]
                asked += 1
        if asked_for := re.match(r"is the (.+) (above|below) the (.+)\?", turn.prompt):
            named = {f"{t.colour} {t.name}": t for t in one.scene.things}
            above = named[asked_for.group(1)].row < named[asked_for.group(3)].row
            assert final == ("yes" if above == (asked_for.group(2) == "above") else "no")
            asked += 1
    assert asked > 40


def test_charts_have_one_highest_column() -> None:
    for one in sample_requests("chart"):
        heights = [sum(t.column == column for t in one.scene.things) for column in range(3)]
        assert heights.count(max(heights)) == 1
        final = dict(one.turns[0].facts)["final"]
        highest = ("left", "center", "right")[heights.index(max(heights))]
        assert final in (highest, NUMBERS[sum(heights)])


def test_wordings_vary_and_a_seed_repeats() -> None:
    first, again = (requests(24, "train", seed=5) for _ in range(2))
    assert [one.turns for one in first] == [one.turns for one in again]
    assert first[0].image.size == (192, 192)
    openings = {turn.answer.split(".")[0] for one in first for turn in one.turns}
    assert len(openings) > 15


def test_splits_share_no_scene_and_the_words_are_known() -> None:
    kinds = requests(60, "train"), requests(60, "held-out")
    seen, held_out = ({one.scene.facts() for one in part} for part in kinds)
    assert not seen & held_out
    known = set(request_words())
    for one in kinds[1]:
        for turn in one.turns:
            assert {*words(turn.prompt), *words(turn.answer)} <= known


def test_a_prompt_with_the_scene_states_every_fact_and_asks_the_same() -> None:
    known = set(request_words())
    for one in requests(12, "train"):
        written = write_scene_into_prompt(one)
        listed, _, asked = written.turns[0].prompt.partition(". ")
        assert asked == one.turns[0].prompt
        assert written.turns[1:] == one.turns[1:]
        assert set(words(listed)) <= known
        mentions = find_mentions(listed)
        assert [(m.size, m.colour, m.name, m.place) for m in mentions] == list(one.scene.facts())


def test_targets_and_no_draft_models_are_trained_on_requests() -> None:
    names = ("zoo:llava-chat", "zoo:text", "zoo:llava", "zoo:text-drafter")
    assert [is_trained_on_requests(name) for name in names] == [True, True, False, False]


def test_other_categories_and_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="category is 'poem'; it must be one of short-question"):
        requests(1, category="poem")
    with pytest.raises(ValueError, match="split is 'test'; it must be 'train' or 'held-out'"):
        requests(1, "test")  # type: ignore[arg-type]
