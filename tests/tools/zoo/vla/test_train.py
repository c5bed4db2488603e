"""The policy of the zoo reaches held-out goals; its head and its trajectories are of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmspec
from mmspec import zoo
from mmspec.codes.trajectories import Trajectories
from mmspec.modalities.vla.worlds.table import TableReach
from tests.covering import exhaustive
from tools.zoo.vla.episodes import run_episodes
from tools.zoo.vla.train import space_of


@pytest.fixture(scope="module")
def policy() -> Any:
    return zoo.load("vla")


@pytest.fixture(scope="module")
def ears() -> Any:
    return zoo.processor("vla")


def test_files_are_small_and_the_target_is_deep(policy: Any) -> None:
    sizes = {
        name: sum(one.stat().st_size for one in zoo.path(name).glob("*.safetensors"))
        for name in ("vla", "vla-drafter", "vla-slots")
    }
    assert sizes["vla"] <= 4_500_000
    assert sizes["vla-drafter"] <= 500_000
    assert sizes["vla-slots"] <= 200_000
    assert len(policy.language_model.model.layers) >= 24
    for layer in policy.language_model.model.layers:  # none of them adds nothing
        assert layer.self_attn.o_proj.weight.abs().max() > 1e-3
        assert layer.mlp.down_proj.weight.abs().max() > 1e-3


@pytest.mark.exhaustive
def test_it_reaches_held_out_goals(policy: Any, ears: Any) -> None:
    episodes = run_episodes(policy, ears, space_of(policy), "held-out", range(500, 508))
    assert sum(one.is_success for one in episodes) >= 6


@pytest.mark.slow
def test_it_reaches_most_held_out_goals(policy: Any, ears: Any) -> None:
    """On seeds that its card, which says 0.95, is not about."""
    episodes = run_episodes(policy, ears, space_of(policy), "held-out", range(1000, 1100))
    assert sum(one.is_success for one in episodes) >= 85


def test_what_is_asked_decides_where_it_goes(policy: Any, ears: Any) -> None:
    """The same picture and two instructions are two different actions, towards either thing."""
    world = TableReach("held-out")
    seed = next(s for s in range(50) if world.reset(seed=s) and len(world.scene.things) > 1)
    pictures, asked = [], []
    for thing in (0, 1):
        observation, info = world.reset(seed=seed, options={"thing": thing})
        pictures.append(observation["image"])
        asked.append(info["instruction"])
    assert (pictures[0] == pictures[1]).all()
    out = policy.generate(**ears.instruct(asked, pictures), do_sample=False, max_new_tokens=7)
    assert (out[0, -7:-1] - out[1, -7:-1]).abs().max() > 9


def test_its_head_drafts_and_changes_nothing(policy: Any, ears: Any) -> None:
    fast = mmspec.accelerate(policy, "eagle", drafter=zoo.load("vla-drafter"), processor=ears)
    world = TableReach("held-out")
    accepted = 0
    for seed in range(6):
        observation, info = world.reset(seed=seed)
        asked = ears.instruct(info["instruction"], observation["image"])
        plain = policy.generate(**asked, do_sample=False, max_new_tokens=7)
        out = fast.generate(**asked, do_sample=False, max_new_tokens=7)
        torch.testing.assert_close(out.sequences, plain)
        accepted += out.stats.num_accepted_draft_tokens
    assert accepted > 0


@pytest.mark.exhaustive
def test_its_name_brings_its_head_and_its_trajectories() -> None:
    for recipe in ("spec-vla", "retrieval", "oft-draft", "oft-draft-tolerance"):
        fast = mmspec.accelerate("zoo:vla", recipe)
        observation, info = TableReach("held-out").reset(seed=2)
        assert fast.predict_action(observation["image"], info["instruction"]).shape == (7,)
        assert fast.last_stats is not None
        assert fast.last_stats.num_draft_tokens > 0
    with pytest.raises(ValueError, match="needs a feature head"):
        mmspec.accelerate(zoo.load("vla"), "spec-vla")


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(range(5), marks=pytest.mark.exhaustive),
        pytest.param(range(5, 50), marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
def test_exact_recipes_act_as_plain_decoding_from_many_starts(
    policy: Any, ears: Any, starts: range
) -> None:
    """The zoo's policy in float32, in closed loop: tokens, actions and states of every step."""
    world = TableReach("held-out")
    plain = mmspec.accelerate(policy, "plain", processor=ears)
    told = {"eagle-2": {"drafter": zoo.load("vla-drafter")}}
    told["retrieval"] = {"store": zoo.path("vla-drafter")}
    told["oft-draft"] = {"drafter": zoo.load("vla-slots")}
    told["oft-draft-tolerance"] = {**told["oft-draft"], "radius": 0}
    ways = {
        name: mmspec.accelerate(policy, name, processor=ears, **told.get(name, {}))
        for name in ("hold-last", "kalman", "prompt-lookup", *told)
    }
    drafted = dict.fromkeys(ways, 0)
    for seed in starts:
        wanted = plain.rollout(world, seed=seed, steps=5)
        for name, fast in ways.items():
            found = fast.rollout(world, seed=seed, steps=5)
            assert found.tokens == wanted.tokens, (name, seed)
            assert np.array_equal(np.stack(found.states), np.stack(wanted.states))
            drafted[name] += found.stats.num_accepted_draft_tokens
    assert min(drafted[name] for name in ("hold-last", "eagle-2", "retrieval")) > 0


def test_its_head_foresees_most_of_an_action_within_a_tolerance(policy: Any, ears: Any) -> None:
    """Plain decoding takes six calls behind the prompt; its card says 3.6 tokens a round."""
    head = zoo.load("vla-drafter")
    fast = mmspec.accelerate(policy, "spec-vla", drafter=head, processor=ears, length=6)
    world, calls = TableReach("held-out"), 0
    for seed in range(6):
        observation, info = world.reset(seed=seed)
        asked = ears.instruct(info["instruction"], observation["image"])
        calls += fast.generate(**asked, do_sample=False, max_new_tokens=7).stats.num_spec_steps
    assert calls <= 6 * 2.5


def test_stored_trajectories_are_the_policys_own(policy: Any) -> None:
    store = Trajectories.load(zoo.path("vla-drafter"))
    assert store.features.shape[1] == policy.config.text_config.hidden_size
    assert store.actions.shape[1] == 7
    assert store.states is not None
    assert store.states.shape[1] == 7
    nearest, moments = store.nearest(store.features[:20], 1)
    assert (nearest > 0.999).all()
    assert (store.actions[moments[:, 0]] - store.actions[:20]).abs().max() < 0.05


@pytest.mark.exhaustive
def test_its_slots_and_what_is_held_end_an_action_in_about_one_call(policy: Any, ears: Any) -> None:
    """Plain decoding takes six behind the prompt; without a radius the way is its very own."""
    parts: Any = {"drafter": zoo.load("vla-slots"), "processor": ears}
    fast = mmspec.accelerate(policy, "oft-draft-tolerance", **parts)
    exact = mmspec.accelerate(policy, "oft-draft-tolerance", radius=0, **parts)
    plain = mmspec.accelerate(policy, "plain", processor=ears)
    world = TableReach("held-out")
    calls: list[int] = []
    for seed in (1, 4):
        calls += [step.target_calls for step in fast.rollout(world, seed=seed, steps=8).steps]
        wanted = plain.rollout(world, seed=seed, steps=4)
        found = exact.rollout(world, seed=seed, steps=4)
        assert found.tokens == wanted.tokens
        assert np.array_equal(np.stack(found.states), np.stack(wanted.states))
    assert sum(calls) / len(calls) < 1.6
    assert 0 in calls  # where the last action passed with the prompt


@pytest.mark.parametrize(
    "recipe", exhaustive(("heisd", "retrieval", "oft-draft-tolerance"), ("heisd",))
)
def test_what_was_saved_goes_on_elsewhere(recipe: str, tmp_path: Path) -> None:
    """The target by its name, in its precision, and stored trajectories with the head."""
    fast = mmspec.accelerate("zoo:vla", recipe)
    fast.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "mmspec.json").read_text())["target"] == "zoo:vla"
    again = mmspec.load(tmp_path)
    assert next(again.model.parameters()).dtype == torch.float32
    shown, told = TableReach("held-out").reset(seed=3)
    for _ in range(2):
        first, second = (
            one.predict_action(shown["image"], told["instruction"]) for one in (fast, again)
        )
        assert first.tolist() == second.tolist()
