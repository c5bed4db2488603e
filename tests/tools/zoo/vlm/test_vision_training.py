"""Training of vision towers for invariance to backgrounds, and its images."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmspec.training.fitting import CosineDecay, TrainingRun
from mmspec.zoo.catalogue import load
from mmspec.zoo.scene import BOARD, Scene, sample
from mmspec.zoo.scene_tensors import encode_boards, render_pixels
from tools.zoo.vlm.drawings import sample_drawing
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.vision_training import plain_pictures, thing_tiles, train_vision_invariance


def test_plain_pictures_are_what_the_world_draws_of_things_in_the_middle() -> None:
    scenes = [Scene(tuple(replace(t, shift=(0.0, 0.0)) for t in sample(n).things)) for n in (3, 8)]
    drawn = np.stack([render_pixels(scene) for scene in scenes]).astype(int)
    found = plain_pictures(encode_boards(scenes), thing_tiles()).astype(int)
    assert np.abs(found - drawn).max() <= 8  # what reaches over the edge of a cell, smoothed
    assert np.abs(found[0] - drawn[1]).max() > 100


@pytest.mark.parametrize("seed", range(8))
def test_a_drawing_has_its_things_where_its_facts_say(seed: int) -> None:
    picture, scene = sample_drawing(np.random.default_rng(seed))
    pictured = picture.astype(int)
    far = np.abs(pictured - np.median(pictured, axis=(0, 1))).sum(-1) > 60
    cells = far.reshape(BOARD, 16, BOARD, 16).mean((1, 3))
    assert all(cells[thing.row, thing.column] > 0.03 for thing in scene.things)
    if len(scene.things) == 1:
        y, x = (index.mean() for index in np.nonzero(far))
        assert abs(y / 16 - scene.things[0].row - 0.5) < 0.62
        assert abs(x / 16 - scene.things[0].column - 0.5) < 0.62


def test_drawings_are_a_function_of_their_seed() -> None:
    one, other, third = (sample_drawing(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(one[0], other[0])
    assert one[1] == other[1] != third[1]


def test_the_lesson_leaves_the_text_model_as_it_is() -> None:
    model: Any = load("llava-drafter")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    train_vision_invariance(model, FAMILIES["llava"], [CosineDecay(4, 1e-3)], TrainingRun(steps=1))
    changed = {n for n, w in model.state_dict().items() if not torch.equal(w, before[n])}
    assert {name.split(".")[1] for name in changed} == {"vision_tower", "multi_modal_projector"}
