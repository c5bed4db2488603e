"""The harder task: distractors, goals in turn that move, and an expert that masters it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from mmspec.modalities.vla.worlds import make_held_out_world, make_world
from mmspec.modalities.vla.worlds.moving_goals import CELL, MovingGoals, sample_scene
from mmspec.modalities.vla.worlds.table import TableReach
from mmspec.zoo.scene import Split

STILL = np.array([0, 0, 0, 0, 0, 0, 1.0])


@pytest.mark.filterwarnings("ignore:.*alternative render modes.*")
def test_it_is_an_environment_as_gymnasium_checks_them() -> None:
    check_env(make_world("moving-goals", size=32, render_mode="rgb_array"))


def test_the_expert_reaches_the_goals_in_turn() -> None:
    world = MovingGoals("held-out", size=16)
    for seed in range(8):
        _, info = world.reset(seed=seed)
        first, then = info["task"].split(", then ")
        assert first != then
        told, rewards, is_over = [info["instruction"]], 0.0, False
        while not is_over:
            _, reward, terminated, is_over, info = world.step(world.expert())
            told.append(info["instruction"])
            rewards += reward
            assert info["is_success"] == terminated == (info["reached"] == 2)
            is_over = is_over or terminated
        assert info["is_success"]
        assert rewards == 2
        assert list(dict.fromkeys(told)) == [first, then]


def test_the_goal_moves_and_turns_back_and_the_rest_lies_still() -> None:
    world = MovingGoals(size=16, steps=200)
    world.reset(seed=3)
    before = world.scene.things
    places = [world.goal]
    for _ in range(100):
        world.step(STILL)
        places.append(world.goal)
    moved = [one != two for one, two in zip(before, world.scene.things, strict=True)]
    assert sum(moved) == 1
    (goal,) = (one for one, is_moved in zip(world.scene.things, moved, strict=True) if is_moved)
    track = np.array(places)
    lengths = np.linalg.norm(np.diff(track, axis=0), axis=1)
    assert lengths.max() <= world.speed + 1e-9
    assert np.median(lengths) == pytest.approx(world.speed)  # but where it turns
    middle = ((goal.column + 0.5) * CELL - 0.3, 0.3 - (goal.row + 0.5) * CELL)
    assert np.abs(track[5:] - middle).max() <= world.reach + 1e-9
    assert np.ptp(track[:, 0]) > world.reach
    still = MovingGoals(size=16, speed=0.0)
    still.reset(seed=3)
    start = still.goal
    still.step(STILL)
    assert still.goal == start


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_tables_are_full_and_of_their_split(split: Split) -> None:
    for count in (2, 5, 9):
        scene = sample_scene(split, count, np.random.default_rng(count))
        assert scene.split == split
        assert len({(one.row, one.column) for one in scene.things}) == count
        assert len({(one.colour, one.name) for one in scene.things}) == count


def test_the_same_seed_is_the_same_episode() -> None:
    worlds: Any = [make_held_out_world("moving-goals") for _ in range(2)]
    images = [[world.reset(seed=4)[0]["image"]] for world in worlds]
    for world, seen in zip(worlds, images, strict=True):
        seen += [world.step(world.expert())[0]["image"] for _ in range(6)]
    assert all(np.array_equal(one, two) for one, two in zip(*images, strict=True))
    assert not np.array_equal(worlds[0].reset(seed=5)[0]["image"], images[0][0])
    assert images[0][0].shape == TableReach().observation_space["image"].shape  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "split='test'.*'train', 'held-out'"),
        ({"objects": 10}, "objects=10 .*at most 9"),
        ({"goals": 6}, "goals=6 .*at most 5"),
        ({"speed": 0.05}, "speed=0.05 .*at most 0.0"),
        ({"reach": 0.2}, "reach=0.2 .*at most 0.1"),
        ({"steps": 0}, "steps=0 .*at least 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_world("moving-goals", **options)


def test_calls_out_of_turn_are_refused() -> None:
    world = MovingGoals(size=16, steps=1)
    for call in (world.expert, world.render, lambda: world.step(STILL)):
        with pytest.raises(ValueError, match="call reset"):
            call()
    with pytest.raises(ValueError, match=r"options \['thing'\] are not known"):
        world.reset(options={"thing": 1})
    world.reset(seed=0)
    with pytest.raises(ValueError, match=r"must be \(7,\) finite numbers"):
        world.step(np.zeros(6))
    assert world.step(STILL)[3]
    with pytest.raises(ValueError, match="the episode is over"):
        world.step(STILL)
