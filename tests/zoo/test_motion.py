"""Moving scenes: frames, questions and answers, and scores of answers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mmspec.modalities.vlm import LanguageSettings
from mmspec.modalities.vlm.formatting import read_scene_clip
from mmspec.zoo.clip_questions import (
    ClipExample,
    clip_examples,
    clip_words,
    score_clip,
    score_motion,
    write_clip_text,
)
from mmspec.zoo.language import words
from mmspec.zoo.motion import BUNDLED_CLIP, FRAMES, MovingScene, sample_moving_scenes

SOME = sample_moving_scenes(60, "train") + sample_moving_scenes(30, "held-out")


def test_a_number_makes_one_clip() -> None:
    again = sample_moving_scenes(60, "train") + sample_moving_scenes(30, "held-out")
    assert again == SOME
    assert [write_clip_text(scene, number) for scene, number in SOME] == [
        write_clip_text(*one) for one in again
    ]


def test_no_clip_is_on_both_sides() -> None:
    assert {scene.split for scene, _ in SOME[:60]} == {"train"}
    assert {scene.split for scene, _ in SOME[60:]} == {"held-out"}


@pytest.mark.parametrize("scene", [scene for scene, _ in SOME[:20]] + [BUNDLED_CLIP])
def test_things_move_one_after_the_other_and_never_meet(scene: MovingScene) -> None:
    ends = [0, *(move.last for move in scene.moves)]
    starts = [*(move.first for move in scene.moves), FRAMES - 1]
    assert all(last < first for last, first in zip(ends, starts, strict=True))
    for frame in range(FRAMES):
        places = [
            (t.column + t.shift[0], t.row + t.shift[1], t.radius)
            for t in scene.scene_at(frame).things
        ]
        for i, (x, y, r) in enumerate(places):
            assert 0.4 < x + 0.5 < 2.6
            assert 0.4 < y + 0.5 < 2.6
            for u, v, other in places[:i]:
                assert np.hypot(x - u, y - v) > 0.95 * (r + other)


def test_a_higher_rate_shows_the_same_scene_in_between() -> None:
    frames, more = ([*map(np.asarray, BUNDLED_CLIP.render(24, rate))] for rate in (1, 4))
    assert len(more) == 4 * len(frames) == 4 * FRAMES
    assert all(np.array_equal(*pair) for pair in zip(frames, more[::4], strict=True))
    moving = BUNDLED_CLIP.moves[0].first
    assert not np.array_equal(more[4 * moving + 1], more[4 * moving])


def test_a_clip_has_the_frames_that_are_asked_for() -> None:
    for asked, count, rate_hz in (
        ({}, 32, 2.0),
        ({"frames": 8}, 8, 2.0),
        ({"frames": 128}, 128, 8.0),
        ({"fps": 1.0}, 16, 2.0),
        ({"fps": 3.0}, 48, 4.0),
    ):
        clip = read_scene_clip(BUNDLED_CLIP, LanguageSettings(**asked))
        assert (len(clip.frames), clip.rate_hz) == (count, rate_hz)
    with pytest.raises(ValueError, match="frames=300 of the list, which has 256"):
        read_scene_clip(BUNDLED_CLIP, LanguageSettings(frames=300))


def test_frames_match_the_moves() -> None:
    frames = [np.asarray(frame).astype(int) for frame in BUNDLED_CLIP.render(96)]
    changed = [np.abs(a - b).max() > 60 for a, b in itertools.pairwise(frames)]
    moving = [
        any(move.first <= at < move.last for move in BUNDLED_CLIP.moves) for at in range(FRAMES - 1)
    ]
    assert changed == moving
    for frame, row, column in ((0, 0, 0), (-1, 0, 2)):  # the star, orange
        cell = frames[frame][32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
        assert (np.abs(cell - np.array([244, 128, 18])).max(-1) < 30).mean() > 0.1


@pytest.mark.parametrize("kind", ["caption", "question"])
def test_right_answers_are_right_and_others_are_not(kind: Any) -> None:
    examples = clip_examples(40, "train", kind=kind, size=24)
    assert all(score_clip(one, one.answer) == (len(one.facts),) * 2 for one in examples)
    assert all(score_clip(one, "")[0] == 0 for one in examples)
    assert {word for one in examples for word in words(one.answer)} <= set(clip_words())


@pytest.mark.parametrize(
    ("right", "wrong", "lost"),
    [
        ("moves right", "moves left", 1),
        ("to top right.", "to top.", 1),
        ("orange star moves", "orange ring moves", 2),  # and so the order
        ("at last the orange star is at top right", "at last the orange star is at top", 1),
        ("at first the large orange star is at top left", "at first the orange star is at left", 1),
    ],
)
def test_a_wrong_word_costs_its_fact(right: str, wrong: str, lost: int) -> None:
    prompt, answer, facts = write_clip_text(BUNDLED_CLIP, 0, "caption")
    example = ClipExample(BUNDLED_CLIP, prompt, answer, facts)
    assert right in answer
    said = answer.replace(right, wrong, 1)
    assert score_clip(example, said) == (len(facts) - lost, len(facts))


def test_what_is_made_up_counts_as_wrong() -> None:
    prompt, answer, facts = write_clip_text(BUNDLED_CLIP, 0, "caption")
    example = ClipExample(BUNDLED_CLIP, prompt, answer, facts)
    more = answer + " the red cross moves up from bottom to top."
    right, asked = score_clip(example, more)
    assert asked == len(facts) + 1
    assert right == len(facts) - 1  # and the order is not that one


def test_facts_of_motion_leave_out_where_things_are_at_first_and_at_last() -> None:
    prompt, answer, facts = write_clip_text(BUNDLED_CLIP, 0, "caption")
    example = ClipExample(BUNDLED_CLIP, prompt, answer, facts)
    assert score_motion(example, answer) == (3, 3)  # two moves and their order
    first, rest = answer.split(". ", 1)
    moves, _ = rest.split(" at last ")
    assert score_motion(example, moves) == (3, 3)
    assert score_motion(example, f"{first}.")[0] == 0
    more = answer + " the red cross moves up from bottom to top."
    assert score_motion(example, more) == (2, 4)
    still = clip_examples(40, "train", kind="question", size=24)
    assert all(score_motion(one, one.answer) == (len(one.facts),) * 2 for one in still)


def test_order_counts() -> None:
    prompt, answer, facts = write_clip_text(BUNDLED_CLIP, 0, "caption")
    first, second = (s for s in answer.split(". ") if " moves " in s)
    swapped = answer.replace(first, "@").replace(second, first).replace("@", second)
    example = ClipExample(BUNDLED_CLIP, prompt, answer, facts)
    assert score_clip(example, swapped) == (len(facts) - 1, len(facts))
