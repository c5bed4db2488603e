"""Tasks of Meta-World behind the observations of all worlds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from mmspec.codes.actions import ActionSpace
from mmspec.modalities.vla.spaces import action_codes
from mmspec.modalities.vla.worlds import make_world
from mmspec.modalities.vla.worlds.metaworld import STEP, MetaWorldTask
from tests.modalities.vla.policies import fast, policy

pytestmark = pytest.mark.slow  # MuJoCo compiles its models, and draws without a graphics card


@pytest.fixture(scope="module", autouse=True)
def headless() -> Any:
    """Pictures without a display; it must be said before MuJoCo is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUJOCO_GL", "egl")
        yield


@pytest.fixture(scope="module")
def world() -> Any:
    made = MetaWorldTask("reach-v3", size=48)
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore:.*alternative render modes.*")
def test_it_is_an_environment_as_gymnasium_checks_them(world: MetaWorldTask) -> None:
    check_env(world, skip_render_check=True)


def test_the_expert_reaches(world: MetaWorldTask) -> None:
    for seed in range(2):
        observation, info = world.reset(seed=seed)
        assert info == {"instruction": "reach", "is_success": False}
        first, over, steps = observation, False, 0
        while not over:
            observation, _, terminated, truncated, info = world.step(world.expert())
            over, steps = terminated or truncated, steps + 1
        assert info["is_success"]
        moved = np.linalg.norm(observation["state"][:3] - first["state"][:3])
        assert 0.02 < moved < steps * 3**0.5 * STEP
        assert (observation["image"] != first["image"]).any()


def test_exact_recipes_go_the_way_of_plain_decoding(world: MetaWorldTask) -> None:
    """A random policy from fifty starts, in float32: the tokens and the states of every step."""
    span = {"q01": [-STEP] * 3 + [0.0], "q99": [STEP] * 3 + [1.0], "mask": [True] * 3 + [False]}
    space = ActionSpace.from_statistics(span, action_codes(policy().config))
    names = ("plain", "hold-last", "kalman", "prompt-lookup", "suffix")
    ways = {name: fast(name, actions=space) for name in names}
    for seed in range(50):
        wanted, *others = [way.rollout(world, seed=seed, steps=3) for way in ways.values()]
        for name, found in zip(names[1:], others, strict=True):
            assert found.tokens == wanted.tokens, (name, seed)
            assert np.array_equal(np.stack(found.states), np.stack(wanted.states))


def test_the_same_seed_is_the_same_episode_and_another_is_not(world: MetaWorldTask) -> None:
    runs = []
    for seed in (1, 1, 2):
        world.reset(seed=seed)
        actions = [world.expert()]
        for _ in range(5):
            observation = world.step(actions[-1])[0]
            actions.append(world.expert())
        runs.append((np.stack(actions), observation))
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    np.testing.assert_array_equal(runs[0][1]["image"], runs[1][1]["image"])
    assert (runs[0][0] != runs[2][0]).any()


def test_bad_input_is_refused(world: MetaWorldTask) -> None:
    for options, message in (
        ({"task": "reach"}, "task='reach' is not of Meta-World; choose one of .*reach-v3"),
        ({"size": 4}, "size=4 .*at least 16"),
        ({"steps": 500}, "steps=500 .*at most 499"),
        ({"render_mode": "human"}, "render_mode='human'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_world("metaworld", **options)
    world.reset(seed=0)
    for action in (np.zeros(7), np.full(4, np.nan)):
        with pytest.raises(ValueError, match=r"must be \(4,\) finite numbers"):
            world.step(action)
    with pytest.raises(ValueError, match=r"options.*'goal'"):
        world.reset(options={"goal": 1})
