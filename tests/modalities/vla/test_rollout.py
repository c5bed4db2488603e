"""Exact recipes go the way of plain decoding, step for step, in a world that answers back."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.codes.trajectories import Trajectories
from mmspec.drafters.neural.action_slots import ACTION_SLOTS
from mmspec.modalities.common.families import make_reader
from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.worlds import make_world
from tests.covering import exhaustive
from tests.drafters.heads import untrained_head
from tests.modalities.vla.policies import fast, picture, policy
from tests.toys import prismatic

STEPS = 6  # a random policy reaches nothing; longer episodes are those of the zoo's
EXACT = ("prompt-lookup", "suffix", "eagle-2", "coupled", "hold-last", "kalman")
SLOTS = {"oft-draft": {}, "oft-draft-tolerance": {"radius": 0.0}}


@cache
def world() -> Any:
    return make_world("table", split="held-out")


@cache
def way(recipe: str) -> mmspec.Accelerated:
    if recipe in SLOTS:
        return fast(recipe, drafter=ACTION_SLOTS.random(make_reader(policy()), 0), **SLOTS[recipe])
    if recipe == "eagle-2":
        return fast(recipe, drafter=untrained_head(policy()))
    return fast(recipe, drafter=prismatic.openvla(1)) if recipe == "coupled" else fast(recipe)


@cache
def run_rollout(recipe: str, seed: int, steps: int) -> Rollout:
    found: Rollout = way(recipe).rollout(world(), seed=seed, steps=steps)
    return found


def check_same(recipe: str, seed: int, steps: int = STEPS) -> None:
    mine, plain = run_rollout(recipe, seed, steps), run_rollout("plain", seed, steps)
    assert mine.tokens == plain.tokens
    assert np.array_equal(mine.actions, plain.actions)
    assert np.array_equal(np.stack(mine.states), np.stack(plain.states))
    assert all(np.array_equal(a, b) for a, b in zip(mine.images, plain.images, strict=True))
    assert mine.is_success == plain.is_success


@pytest.mark.parametrize("recipe", exhaustive(EXACT, ("coupled", "eagle-2", "hold-last")))
def test_exact_recipes_go_the_same_way(recipe: str) -> None:
    check_same(recipe, 0)


def test_another_start_is_another_way() -> None:
    assert run_rollout("plain", 0, STEPS).tokens != run_rollout("plain", 1, STEPS).tokens


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(range(6), marks=pytest.mark.exhaustive),
        pytest.param(range(6, 50), marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
@pytest.mark.parametrize("recipe", [*EXACT, *SLOTS])
def test_exact_recipes_go_the_same_way_from_many_starts(recipe: str, starts: range) -> None:
    for seed in starts:
        check_same(recipe, seed)


def test_a_lossy_recipe_goes_another_way() -> None:
    """What the tests above would say of a recipe that is not exact."""
    ours = fast("hold-last-tolerance", radius=255, strict=[])
    mine = ours.rollout(world(), seed=0, steps=STEPS)
    assert mine.tokens[0] == run_rollout("plain", 0, STEPS).tokens[0]  # nothing to hold yet
    assert mine.tokens != run_rollout("plain", 0, STEPS).tokens
    assert not np.array_equal(mine.states[-1], run_rollout("plain", 0, STEPS).states[-1])


def test_what_an_episode_tells() -> None:
    ours = way("plain")
    found: Rollout = ours.rollout(world(), seed=3, steps=4, evaluate=True)
    assert (len(found.images), found.actions.shape, len(found.states)) == (5, (4, 7), 5)
    assert found.stats is not None
    assert ours.last_stats is found.stats
    assert found.stats.steps == 4
    assert found.stats.target_calls == 4 * 6
    assert found.stats.calls_per_action == 6
    assert found.stats.action_error_max == (0.0,) * 7
    assert found.seconds == pytest.approx(sum(one.latency_ms for one in found.steps) / 1e3)
    assert len(ours.steps()) == 4
    assert found.instructions == [world().unwrapped.reset(seed=3)[1]["instruction"]] * 4
    other = ours.rollout(world(), seed=3, steps=1, instruction="Reach the moon")
    assert other.instructions == ["Reach the moon"]
    moved = ours.rollout(world(), seed=0, episode=3, steps=1)
    assert np.array_equal(moved.images[0], found.images[0])


class ChangingInstructions:
    """A world that says another instruction at every step, and has no states."""

    def __init__(self, last: int = 3) -> None:
        self.action_space, self.num_steps, self.last = world().action_space, 0, last

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.num_steps = 0
        return self._observe()

    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        seen, info = self._observe()
        return seen, 0.0, self.num_steps == self.last, False, info

    def _observe(self) -> tuple[Any, dict[str, Any]]:
        info = {
            "instruction": f"reach {'red ' * self.num_steps}cube",
            "is_success": self.num_steps == 3,
        }
        return {"image": np.full((40, 56, 3), 50, np.uint8)}, info


def test_an_instruction_may_change_on_the_way() -> None:
    found = way("prompt-lookup").rollout(ChangingInstructions(), seed=0)
    assert found.instructions == ["reach cube", "reach red cube", "reach red red cube"]
    assert found.is_success
    assert found.states == []
    alone = way("plain").predict_action(found.images[0], "reach red red cube")
    assert np.array_equal(found.actions[2], alone)


@pytest.mark.parametrize("recipe", ["plain", "hold-last"])
def test_episodes_side_by_side_are_those_of_robots_alone(recipe: str) -> None:
    """They end at different times, and their instructions differ in length as they go on."""
    ours, lasts = way(recipe), (4, 1, 3)
    alone = [ours.rollout(ChangingInstructions(last), seed=0) for last in lasts]
    found: Any = ours.rollout(
        [ChangingInstructions(last) for last in lasts], seed=0, robots=[5, 0, 2]
    )
    for mine, wanted, last in zip(found, alone, lasts, strict=True):
        assert mine.tokens == wanted.tokens
        assert np.array_equal(mine.actions, wanted.actions)
        assert mine.instructions == wanted.instructions
        assert (len(mine.steps), mine.is_success) == (last, last >= 3)
    assert [len(ours.steps(robot)) for robot in (5, 0, 2)] == list(lasts)
    stats: Any = ours.last_stats
    assert stats.calls_per_action <= 6
    two: Any = ours.rollout(["table", "table"], episode=3, steps=1)  # episodes 3 and 4 of the world
    assert np.array_equal(two[1].images[0], ours.rollout("table", episode=4, steps=1).images[0])


def test_worlds_that_cannot_be_acted_in_together_are_refused() -> None:
    one = ChangingInstructions()
    for given, words in (([one, one], "twice"), ([], "is empty")):
        with pytest.raises(ValueError, match=words):
            way("plain").rollout(given)
    with pytest.raises(ValueError, match="give one each"):
        way("plain").rollout([one], robots=[0, 1])


def stored() -> Trajectories:
    """Moments that nobody lived."""
    generator = torch.Generator().manual_seed(4)
    width = policy().config.text_config.hidden_size
    features = torch.nn.functional.normalize(torch.randn(36, width, generator=generator))
    actions = 1.6 * torch.rand(36, 7, generator=generator) - 0.8
    episodes = torch.arange(36) // 18
    return Trajectories(features, actions, episodes, torch.randn(36, 3, generator=generator))


@pytest.mark.parametrize(
    "recipe",
    exhaustive(
        recipes.names("actions"),
        ("openvla-ar", "hold-last", "retrieval", "spec-vla", "kerv", "specprune-vla"),
    ),
)
def test_recipes_of_actions_act_for_robots_in_a_batch(recipe: str) -> None:
    """Whole actions of plausible provenance, and of exact recipes those of plain decoding."""
    plan = recipes.get(recipe)
    more: dict[str, Any] = {"store": stored()} if "store" in plan.options else {}
    if plan.takes_drafter:
        more["drafter"] = plan.draft_model[0].random(fast("plain").session.bound.backbone, 1)
    ours, plain = fast(recipe, **more), fast("plain")
    words = ["reach the red cube", "reach"]
    for step in range(3):
        images = [picture(step), picture(step + 9)]
        found = ours.predict_action(images, words, evaluate=True)
        wanted = plain.predict_action(images, words)
        if plan.exact:
            assert np.array_equal(found, wanted)
        ours.observe(wanted, state=np.full((2, 3), float(step)))
        assert ours.last_stats is not None
        assert ours.last_stats.fallback is None
        for robot in range(2):
            last = ours.steps(robot)[-1]
            assert len(last.tokens) == len(last.sources) == 7
            gap = np.abs(found[robot] - wanted[robot])
            assert np.allclose(last.action_error or (), gap, rtol=0, atol=1e-12)
