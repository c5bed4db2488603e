"""Questions about scenes: facts follow from the scene, and answers state them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mmspec.zoo.captions import COUNTS
from mmspec.zoo.facts import score_facts
from mmspec.zoo.questions import Facts, write_question
from mmspec.zoo.scene import COLOURS, SIZES, Scene, sample


def sample_questions(count: int = 400) -> list[tuple[Scene, str, str, Facts]]:
    generator = np.random.default_rng(0)
    scenes = [sample(seed) for seed in range(count)]
    return [(scene, *write_question(scene, generator)) for scene in scenes]


QUESTIONS = sample_questions()


def test_answers_state_their_facts() -> None:
    for _, prompt, answer, facts in QUESTIONS:
        assert score_facts(facts, answer) == (len(facts), len(facts)), (prompt, answer)


@pytest.mark.parametrize("words", [COLOURS, SIZES])
def test_counts_are_those_of_the_scene(words: tuple[str, ...]) -> None:
    asked = 0
    for scene, prompt, _, facts in QUESTIONS:
        named = [word for word in words if re.search(rf"\b{word} things", prompt)]
        if named:
            things = [one for one in scene.things if named[0] in (one.colour, one.size)]
            assert facts == (("count", COUNTS[len(things)]),)
            asked += 1
    assert asked > 5


def test_existence_is_that_of_the_scene() -> None:
    found = set()
    for scene, prompt, _, facts in QUESTIONS:
        shape = re.search(r"(?:is there|find) a (\w+)", prompt)
        if shape:
            exists = any(one.shape == shape[1] for one in scene.things)
            assert facts == (("answer", "yes" if exists else "no"),)
            found.add(exists)
    assert found == {True, False}


def test_relations_are_those_of_the_scene() -> None:
    found = set()
    for scene, prompt, _, facts in QUESTIONS:
        claim = re.fullmatch(
            r"is the (.+) (to the left of|to the right of|above|below) the (.+)\?", prompt
        )
        if claim:
            by_name = {f"{one.colour} {one.name}": one for one in scene.things}
            if len(by_name) < len(scene.things):
                continue
            a, b = by_name[claim[1]], by_name[claim[3]]
            holds = {
                "to the left of": a.column < b.column,
                "to the right of": a.column > b.column,
                "above": a.row < b.row,
                "below": a.row > b.row,
            }[claim[2]]
            assert dict(facts)["answer"] == ("yes" if holds else "no")
            found.add(holds)
    assert found == {True, False}


def test_a_seed_gives_the_same_questions() -> None:
    assert sample_questions() == QUESTIONS
