import re
from typing import Any

import pytest

from mmspec.zoo.facts import find_mentions
from mmspec.zoo.language import examples, score, words, write
from mmspec.zoo.scene import COLOURS, Scene, Thing, sample

SOME = examples(300, "held-out", size=8)
SCENE = Scene((Thing("circle", "red", "large", 0, 0), Thing("digit", "blue", "small", 1, 2, 7)))


def test_examples_are_a_function_of_their_arguments() -> None:
    again = examples(300, "held-out", size=8)
    assert [(e.prompt, e.answer) for e in SOME] == [(e.prompt, e.answer) for e in again]
    assert len({e.answer for e in SOME}) > 250


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_splits_share_no_scene(split: Any) -> None:
    assert {e.scene.split for e in examples(50, split, size=8)} == {split}


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="held-out"):
        examples(1, "test")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["caption", "question"])
def test_kind_is_obeyed(kind: Any) -> None:
    assert {e.kind for e in examples(30, kind=kind, size=8)} == {kind}


def test_true_answers_score_full_marks() -> None:
    for example in SOME:
        right, asked = score(example, example.answer)
        assert right == asked > 0, example.answer


def test_answers_have_a_sentence_worth_of_words() -> None:
    assert min(len(words(e.answer)) for e in SOME) >= 8
    captions = [len(words(e.answer)) for e in SOME if e.kind == "caption"]
    assert 25 <= sum(captions) / len(captions) <= 60


def test_a_wrong_colour_loses_facts() -> None:
    turn = dict(zip(COLOURS, [*COLOURS[1:], COLOURS[0]], strict=True))
    for example in examples(60, "held-out", kind="caption", size=8):
        wrong = re.sub("|".join(COLOURS), lambda m: turn[m.group()], example.answer)
        right, asked = score(example, wrong)
        assert right < asked


def test_silence_has_no_facts() -> None:
    assert {score(e, "")[0] for e in SOME} == {0}


@pytest.mark.parametrize(
    "text",
    [
        "the picture shows two things: a large red circle in the top left corner and a small blue "
        "digit seven on the right side.",
        "a big red circle, at the top left. on the right there is a tiny blue digit seven.",
        "there is one large thing: the red circle in the top left corner. there is one small "
        "thing: the blue digit seven on the right side.",
        "a blue digit seven, which looks tiny, on the right side, and a red circle which is huge "
        "in the top left corner.",
    ],
)
def test_facts_do_not_depend_on_wording(text: Any) -> None:
    told = {(m.size, m.colour, m.name, m.place) for m in find_mentions(text)}
    assert told == set(SCENE.facts())


def test_things_made_up_count_against_a_caption() -> None:
    example = examples(1, kind="caption", size=8)[0]
    right, asked = score(example, example.answer)
    assert score(example, example.answer + " a small pink ring.") == (right, asked + 1)


def test_every_seed_has_words() -> None:
    for seed in range(200):
        prompt, answer, _ = write(sample(seed), seed)
        assert prompt
        assert answer.endswith(".")
