"""The lesson that shows a model the same things on any ground, and the drawings it learns from."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmspec.training.fitting import Course, Fall
from mmspec.zoo.boards import boards, pixels
from mmspec.zoo.loading import load
from mmspec.zoo.scene import BOARD, Scene, sample
from tools.zoo.vlm.drawings import drawing
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.sight import learn_to_see_anywhere, plain_pictures, thing_tiles


def test_plain_pictures_are_what_the_world_draws_of_things_in_the_middle() -> None:
    scenes = [Scene(tuple(replace(t, shift=(0.0, 0.0)) for t in sample(n).things)) for n in (3, 8)]
    drawn = np.stack([pixels(scene) for scene in scenes]).astype(int)
    found = plain_pictures(boards(scenes), thing_tiles()).astype(int)
    assert np.abs(found - drawn).max() <= 8  # what reaches over the edge of a cell, smoothed
    assert np.abs(found[0] - drawn[1]).max() > 100


@pytest.mark.parametrize("seed", range(8))
def test_a_drawing_has_its_things_where_its_facts_say(seed: int) -> None:
    picture, scene = drawing(np.random.default_rng(seed))
    pictured = picture.astype(int)
    far = np.abs(pictured - np.median(pictured, axis=(0, 1))).sum(-1) > 60
    cells = far.reshape(BOARD, 16, BOARD, 16).mean((1, 3))
    assert all(cells[thing.row, thing.column] > 0.03 for thing in scene.things)
    if len(scene.things) == 1:
        y, x = (index.mean() for index in np.nonzero(far))
        assert abs(y / 16 - scene.things[0].row - 0.5) < 0.62
        assert abs(x / 16 - scene.things[0].column - 0.5) < 0.62


def test_drawings_are_a_function_of_their_seed() -> None:
    one, other, third = (drawing(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(one[0], other[0])
    assert one[1] == other[1] != third[1]


def test_the_lesson_leaves_the_text_model_as_it_is() -> None:
    model: Any = load("llava-drafter")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    learn_to_see_anywhere(model, FAMILIES["llava"], [Fall(4, 1e-3)], Course(steps=1))
    changed = {n for n, w in model.state_dict().items() if not torch.equal(w, before[n])}
    assert {name.split(".")[1] for name in changed} == {"vision_tower", "multi_modal_projector"}
