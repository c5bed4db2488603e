"""Prompts describe scenes: in full for held-out ones, varied for training."""

from __future__ import annotations

import itertools

import numpy as np

from mmspec.zoo.facts import find_mentions
from mmspec.zoo.prompts import iterate_training_scenes, prompts, write_prompt, write_varied_prompt


def test_prompts_say_what_the_scene_shows() -> None:
    for told in prompts(100):
        said = [(m.size, m.colour, m.name, m.place) for m in find_mentions(told.text)]
        assert said == list(told.scene.facts())
        assert 1 <= len(said) <= 3
        assert told.scene.split == "held-out"


def test_training_prompts_say_nothing_false_and_now_and_then_leave_something_out() -> None:
    generator = np.random.default_rng(0)
    left_out = 0
    for scene in itertools.islice(iterate_training_scenes(0), 200):
        assert scene.split == "train"
        words = write_varied_prompt(scene, generator).replace(",", "").split()
        true = set(write_prompt(scene).replace(",", "").split()) | {"a", "an"}
        assert set(words) <= true
        left_out += len(words) < 3 * len(scene.things)
    assert left_out < 60
