"""Questions about clips with documents: what is asked, what is right, and what is not."""

from __future__ import annotations

import re
from collections import Counter

from mmspec.zoo.clip_documents import DOCUMENTS, NAMES, document_questions, write_document_question
from mmspec.zoo.clip_questions import score_clip, write_clip_text, write_motion
from mmspec.zoo.motion import sample_moving_scenes


def test_one_document_names_a_thing_of_the_clip_and_the_answer_is_about_it() -> None:
    for one in document_questions(60):
        shown = {f"{thing.colour} {thing.name}" for thing in one.example.scene.things}
        assert len({*one.subjects}) == len(one.documents) == DOCUMENTS
        assert [subject in shown for subject in one.subjects].count(True) == 1
        assert one.subjects[one.right] in shown
        assert one.subjects[one.right] in one.example.answer
        (name,) = {*one.example.prompt.rstrip("?").split()} & {*NAMES}
        assert one.documents == tuple(f"{name} is the {subject}." for subject in one.subjects)
        assert score_clip(one.example, one.example.answer) == (1, 1)


def test_answers_about_other_things_have_no_facts() -> None:
    (one,) = document_questions(1)
    for thing in range(len(one.example.scene.things)):
        motion, fact = write_motion(one.example.scene, thing)
        own = one.example.scene.things[thing]
        text = f"the {own.size} {own.colour} {own.name} {motion}."
        is_right = one.example.facts == (fact,)
        assert (score_clip(one.example, text)[0] == 1) == is_right


def test_questions_are_drawn_by_their_number_and_in_any_place() -> None:
    found = document_questions(120)
    assert found[:3] == document_questions(3)
    places = Counter(one.right for one in found)
    assert {*places} == {*range(DOCUMENTS)}
    assert min(places.values()) > 12
    moving = sum("goes" in one.example.answer for one in found)
    assert 60 < moving < 120
    ((scene, number),) = sample_moving_scenes(1, "held-out", 0)
    assert write_document_question(scene, number) == found[0]
    assert len({write_document_question(scene, number + at).documents for at in range(4)}) == 4


def test_wrong_things_are_often_like_one_of_the_clip() -> None:
    alike, count = 0, 0
    for one in document_questions(60):
        colours = {thing.colour for thing in one.example.scene.things}
        names = {thing.name for thing in one.example.scene.things}
        for at, subject in enumerate(one.subjects):
            colour, _, name = subject.partition(" ")
            count += at != one.right
            alike += at != one.right and (colour in colours or name in names)
    assert 0.5 < alike / count < 0.9


def test_questions_without_documents_say_the_same_of_a_thing() -> None:
    asked = 0
    for scene, number in sample_moving_scenes(40):
        prompt, answer, facts = write_clip_text(scene, number, "question")
        if re.match("what does the .* do|where does the .* go", prompt):
            motions = [write_motion(scene, at) for at in range(len(scene.things))]
            assert any(motion in answer and facts == (fact,) for motion, fact in motions)
            asked += 1
    assert asked > 5
