"""The embedded world: a Gymnasium environment, repeatable, that its expert masters."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from mmspec.modalities.vla.worlds import WORLDS, make_world
from mmspec.modalities.vla.worlds.arm import LIMITS
from mmspec.modalities.vla.worlds.table import MAX_STEPS, TableReach, position
from mmspec.zoo.scene import Style

MOST = np.array([*LIMITS, 1.0])
STILL = np.array([0, 0, 0, 0, 0, 0, 1.0])


def rollout(world: TableReach, seed: int) -> tuple[list[np.ndarray], list[np.ndarray], bool]:
    """Pictures and actions of the expert's episode, and whether it was a success."""
    observation, info = world.reset(seed=seed)
    pictures, actions, over = [observation["image"]], [], False
    while not over:
        actions.append(world.expert())
        observation, _, terminated, truncated, info = world.step(actions[-1])
        pictures.append(observation["image"])
        over = terminated or truncated
    return pictures, actions, info["is_success"]


@pytest.mark.filterwarnings("ignore:.*alternative render modes.*")
def test_it_is_an_environment_as_gymnasium_checks_them() -> None:
    check_env(make_world("table", size=32, render_mode="rgb_array"))


@pytest.mark.parametrize("style", ["plain", "textured"])
def test_the_expert_reaches_every_goal(style: Style) -> None:
    world = TableReach("held-out", style, size=16)
    episodes = [rollout(world, seed) for seed in range(25)]
    assert all(is_success for _, _, is_success in episodes)
    assert all(len(actions) < MAX_STEPS for _, actions, _ in episodes)


def test_no_dimension_is_constant_or_the_last_value() -> None:
    world = TableReach(size=16)
    episodes = [np.stack(rollout(world, seed)[1]) for seed in range(25)]
    within = np.concatenate([np.diff(one, axis=0) for one in episodes])
    low, high = np.quantile(np.concatenate(episodes), [0.01, 0.99], axis=0)
    bins = np.abs(within) / (high - low) * 255
    assert (np.concatenate(episodes).std(0) > 0).all()
    assert ((bins > 9).mean(0) > 0.1).all()  # of steps: more than Spec-VLA's tolerance
    assert (bins > 9).any(1).mean() > 0.8


def test_the_same_seed_is_the_same_episode_and_another_is_not() -> None:
    first, second = (rollout(TableReach(style="textured", size=32), 3) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    other = rollout(TableReach(style="textured", size=32), 4)
    assert not np.array_equal(first[0][0], other[0][0])


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_goals_are_split_as_the_scene_world_splits(split: Any) -> None:
    world = TableReach(split, size=16)
    for seed in range(10):
        world.reset(seed=seed)
        assert world.scene.split == split


def test_what_the_hand_does_is_seen() -> None:
    """A move along any axis that a picture can show changes pixels."""
    world = TableReach(size=72)
    for axis in (0, 1, 2, 5, 6):
        before = world.reset(seed=5)[0]["image"].astype(int)
        action = STILL * (axis == 6)
        action[axis] = MOST[axis]
        after = world.step(action)[0]["image"].astype(int)
        assert (np.abs(after - before).max(-1) > 60).sum() >= 4, axis


def test_a_grasp_elsewhere_is_no_success() -> None:
    """The expert of one thing never succeeds at another, nor one that never closes."""
    world = TableReach(size=16)
    seed = next(s for s in range(50) if world.reset(seed=s) and len(world.scene.things) > 1)
    world.reset(seed=seed, options={"thing": 0})
    for _ in range(MAX_STEPS):
        world.aim(1)
        action = world.expert()
        world.aim(0)
        _, reward, terminated, truncated, _ = world.step(action)
        assert not terminated
        assert reward == 0
    assert truncated
    world.reset(seed=seed)
    over = False
    while not over:
        _, _, terminated, over, _ = world.step(np.array([*world.expert()[:6], 1.0]))
        assert not terminated


def test_another_instruction_in_mid_episode() -> None:
    world = TableReach(size=16)
    seed = next(s for s in range(50) if world.reset(seed=s) and len(world.scene.things) > 1)
    _, info = world.reset(seed=seed, options={"thing": 0})
    for _ in range(3):
        world.step(world.expert())
    said = world.aim(1)
    assert said != info["instruction"]
    over = False
    while not over:
        observation, _, terminated, truncated, info = world.step(world.expert())
        over = terminated or truncated
    assert info == {"instruction": said, "is_success": True}
    hand = observation["state"][:2]
    assert np.hypot(*(hand - position(world.scene.things[1]))) < 0.04


def test_more_than_the_arm_can_is_done_as_far_as_it_can() -> None:
    worlds = [TableReach(size=16) for _ in range(2)]
    for world in worlds:
        world.reset(seed=0)
    reached = [
        world.step(action)[0]["state"]
        for world, action in zip(worlds, (MOST, 10 * MOST), strict=True)
    ]
    np.testing.assert_array_equal(reached[0], reached[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "split='test'.*'train', 'held-out'"),
        ({"style": "oil"}, "style='oil'.*'plain', 'textured'"),
        ({"size": 4}, "size=4 .*at least 16"),
        ({"size": 72.5}, "size=72.5 must be a whole number"),
        ({"render_mode": "human"}, "render_mode='human'.*'rgb_array'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_world("table", **options)


@pytest.mark.parametrize(
    "action", [np.zeros(6), np.zeros((1, 7)), np.full(7, np.nan), np.array([np.inf] * 7)]
)
def test_bad_actions_are_refused(action: np.ndarray) -> None:
    world = TableReach(size=16)
    world.reset(seed=0)
    with pytest.raises(ValueError, match=r"must be \(7,\) finite numbers"):
        world.step(action)


def test_calls_out_of_turn_are_refused() -> None:
    world = TableReach(size=16)
    for call in (world.expert, world.render, lambda: world.step(STILL), lambda: world.aim(0)):
        with pytest.raises(ValueError, match="call reset"):
            call()
    with pytest.raises(ValueError, match=r"options.*'goal'.*are not known"):
        world.reset(options={"goal": 1})
    with pytest.raises(ValueError, match=r"thing=9; the scene has things 0 to \d"):
        world.reset(options={"thing": 9})
    world.reset(seed=0)
    for _ in range(MAX_STEPS):
        world.step(STILL)
    with pytest.raises(ValueError, match="the episode is over"):
        world.step(STILL)
    with pytest.raises(ValueError, match="world 'moon' is not known; choose one of table"):
        make_world("moon")


@pytest.mark.parametrize("world", WORLDS)
def test_without_the_extra_one_error_names_it(world: str) -> None:
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from mmspec.modalities.vla.worlds import make_world\n"
        f"try: make_world({world!r})\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install mmspec[robot]" in done.stdout, done.stderr
    assert "gymnasium" in done.stdout
