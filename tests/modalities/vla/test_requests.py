"""What no policy can answer is refused in one clear error, before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmspec
from mmspec import registry
from mmspec.codes.actions import ActionCodes, ActionSpace
from tests import toys
from tests.modalities.vla.policies import SIZE, fast, picture, policy, processor
from tests.toys import prismatic
from tests.toys.prismatic import SPAN

ASK = (picture(), "reach")


def predict(*args: Any, **arguments: Any) -> Callable[[], Any]:
    return lambda: fast("plain").predict_action(*(args or ASK), **arguments)


def observe_call(*args: Any, **arguments: Any) -> Callable[[], Any]:
    def act() -> None:
        ours = fast("plain")
        ours.observe(np.zeros(SIZE), np.zeros(4))
        ours.observe(*args, **arguments)

    return act


def select_call(**changes: Any) -> Callable[[], Any]:
    shown = {"observation.image": torch.zeros(1, 3, 8, 8), "task": ["reach"], **changes}
    given = {name: value for name, value in shown.items() if value is not None}
    return lambda: fast("plain").select_action(given)


def two_sets() -> Any:
    return prismatic.openvla(norm_stats={"a": {"action": SPAN}, "b": {"action": SPAN}})


def mixed() -> None:
    other = {"action": {**SPAN, "q99": [0.5] * 6 + [1.0]}}
    model = prismatic.openvla(norm_stats={"a": {"action": SPAN}, "b": other})
    ours = mmspec.accelerate(model, "plain", processor=processor())
    ours.predict_action(*ASK, unnorm_key="a")
    ours.predict_action(*ASK, unnorm_key="b")


def _rollout(world: Any) -> Any:
    return fast().rollout(world)


def partner(bins: int) -> Any:
    return prismatic.openvla(1, n_action_bins=bins)


LEFT: Any = "left"
SMALL = ActionSpace.from_statistics(SPAN, ActionCodes(9999, 256))
CASES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "key that is not known": (predict(unnorm_key="fractal"), ["'fractal'", "toy"]),
    "key at construction": (lambda: fast(unnorm_key="bridge"), ["'bridge'", "toy"]),
    "which of two data sets": (
        lambda: mmspec.accelerate(two_sets(), "plain").predict_action(*ASK),
        ["2 data sets", "unnorm_key=", "a, b"],
    ),
    "another key in mid-episode": (mixed, ["robot 0", "reset(robots=[0])"]),
    "told before it is known whose statistics": (
        lambda: mmspec.accelerate(two_sets(), "plain").observe(np.zeros(SIZE)),
        ["2 data sets", "unnorm_key=", "accelerate()", "predict an action first"],
    ),
    "told a picture": (observe_call(picture()), ["action=", "numbers"]),
    "told rows of two lengths": (observe_call([[0.0], [0.0, 1.0]]), ["action=", "numbers"]),
    "no statistics": (
        lambda: mmspec.accelerate(toys.model("llava"), "plain", modality="vla"),
        ["norm_stats", "actions="],
    ),
    "actions of another vocabulary": (
        lambda: mmspec.accelerate(policy(), "plain", actions=SMALL),
        ["9999", "384"],
    ),
    "actions that are none": (lambda: fast(actions=[1]), ["actions=", "ActionSpace"]),
    "actions and key": (
        lambda: fast(actions=ActionSpace.from_statistics(SPAN, ActionCodes(320)), unnorm_key="toy"),
        ["actions= and unnorm_key="],
    ),
    "drafter of another action vocabulary": (
        lambda: fast("coupled", drafter=partner(128)),
        ["128 bins", "256", "same action vocabulary"],
    ),
    "grey picture": (predict(np.zeros((8, 8), np.uint8), "reach"), ["(8, 8)", "(H, W, 3)"]),
    "colours first": (predict(np.zeros((3, 8, 8), np.uint8), "reach"), ["(3, 8, 8)", "(H, W, 3)"]),
    "floats": (predict(np.zeros((8, 8, 3)), "reach"), ["float64", "uint8"]),
    "no pixels": (predict(np.zeros((0, 8, 3), np.uint8), "reach"), ["no pixels"]),
    "no picture": (predict("scene.png", "reach"), ["image=", "PIL"]),
    "no cameras": (predict([], "reach"), ["has no image"]),
    "empty instruction": (predict(picture(), "  "), ["instruction='  '", "give a string"]),
    "no instruction": (predict(picture()), ["instruction is missing"]),
    "fewer pictures": (predict([picture()], ["a", "b"]), ["1 images for 2 instructions"]),
    "one picture for two": (predict(picture(), ["a", "b"]), ["image of each robot"]),
    "cameras that differ": (
        predict([[picture()], [picture()] * 2], ["a", "b"]),
        ["1 and 2 cameras"],
    ),
    "robot twice": (predict([picture()] * 2, ["a", "b"], robots=[1, 1]), ["twice"]),
    "robots too few": (predict([picture()] * 2, ["a", "b"], robots=[1]), ["1 robots for 2"]),
    "robots by name": (predict(robots="left"), ["'left'", "such as [0, 2]"]),
    "deadline of nothing": (predict(deadline_ms=0), ["deadline_ms=0", "above 0"]),
    "deadline before": (lambda: fast(deadline_ms=-5.0), ["deadline_ms=-5.0"]),
    "deadline by name": (predict(deadline_ms="soon"), ["deadline_ms='soon'"]),
    "length": (predict(max_new_tokens=3), ["max_new_tokens", "component"]),
    "rows by id": (predict(row_ids=[0]), ["row_ids", "robots="]),
    "unknown word": (predict(unorm_key="toy"), ["unorm_key", "did you mean 'unnorm_key'"]),
    "picture and tensors": (
        predict(*ASK, input_ids=torch.ones(1, 2, dtype=torch.int64)),
        ["input_ids"],
    ),
    "by place": (predict(*ASK, "toy"), ["give the rest by name"]),
    "processor that is none": (lambda: fast(processor=3), ["processor=3"]),
    "no processor": (
        lambda: mmspec.accelerate(prismatic.openvla(), "plain").predict_action(*ASK),
        ["processor="],
    ),
    "action too short": (observe_call(np.zeros(3), np.zeros(4)), ["(3,)", "(1, 7)"]),
    "action of NaN": (observe_call(np.full(SIZE, np.nan), np.zeros(4)), ["NaN"]),
    "state of another length": (observe_call(np.zeros(SIZE), np.zeros(5)), ["state of 5", "4"]),
    "state left out": (observe_call(np.zeros(SIZE)), ["1 states", "with none"]),
    "ends of other robots": (lambda: _reset([0, 1], [True]), ["success=", "2 robots"]),
    "end that is a score": (lambda: _reset([0], [1.0]), ["success=[1.0", "neither True nor False"]),
    "observation without picture": (select_call(**{"observation.image": None}), ["image"]),
    "observation without task": (select_call(task=None), ["task"]),
    "observation in bytes as floats": (
        select_call(**{"observation.image": torch.full((1, 3, 8, 8), 200.0)}),
        ["200", "[0, 1]"],
    ),
    "observation that is none": (lambda: fast().select_action(3), ["observation=3"]),
    "tasks too many": (select_call(task=["a", "b"]), ["2 entries of task for 1 rows"]),
    "world that is not known": (lambda: fast().rollout("moon"), ["'moon'", "table"]),
    "no world": (lambda: fast().rollout(), ["environment="]),
    **{
        f"world {given!r}": (
            partial(_rollout, given),
            ["environment=", "is none", "gymnasium.Env"],
        )
        for given in (0, [None], 1.5)
    },
    "episode that is no number": (
        lambda: fast().rollout("table", episode="first"),
        ["episode='first'", "whole number"],
    ),
    "seed that no environment takes": (
        lambda: fast().rollout("table", seed=-1),
        ["seed=-1", "at least 0"],
    ),
    "robot whose steps are asked for": (
        lambda: fast().steps(LEFT),
        ["robots=['left']", "numbers of robots"],
    ),
    "robots in bytes": (predict(robots=b"x"), ["robots=b'x'", "give a list"]),
    **{
        f"key that is {given!r}": (
            predict(unnorm_key=given),
            [f"unnorm_key={given!r}", "give one of toy"],
        )
        for given in ("", ["a"], 0, False)
    },
    "key in a list at construction": (lambda: fast(unnorm_key=["a"]), ["unnorm_key=['a']", "toy"]),
    "state that is a word": (observe_call(np.zeros(SIZE), "x"), ["state='x'", "numbers"]),
    "temperature in an array": (predict(temperature=np.ones(3)), ["temperature=", "a number"]),
    "task that is a number": (select_call(task=5), ["task=5", "not a text"]),
    "steps of no episode": (lambda: fast().rollout("table", steps=0), ["steps=0"]),
}


def _reset(robots: list[int], success: list[Any]) -> None:
    ours = fast("plain")
    ours.observe(np.zeros((3, SIZE)))
    ours.reset(robots, [*success, *success, *success])


@pytest.mark.parametrize("name", CASES)
def test_one_clear_error(name: str) -> None:
    act, words = CASES[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are below
        act()
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_nothing_is_noted_of_what_was_refused() -> None:
    ours = fast("plain")
    ours.observe(np.zeros((2, SIZE)), np.zeros((2, 4)))
    with pytest.raises(ValueError, match="NaN"):
        ours.observe([[0.0] * SIZE, [float("nan")] * SIZE], np.zeros((2, 4)))
    ours.observe(np.zeros((2, SIZE)), np.zeros((2, 4)))


def test_a_robot_is_told_in_tensors_and_in_numbers_of_numpy() -> None:
    ours = fast("plain")
    ours.observe(torch.zeros(SIZE, dtype=torch.bfloat16), torch.zeros(4, requires_grad=True))
    ours.observe(torch.zeros(2, SIZE), torch.zeros(2, 4), robots=np.flatnonzero([True, True]))
    ours.reset(robots=np.arange(2), success=np.array([True, False]))
    ours.reset(success=np.bool_(True))


def test_a_smaller_policy_may_draft() -> None:
    plain = fast("plain").predict_action(*ASK)
    assert np.array_equal(fast("coupled", drafter=partner(256)).predict_action(*ASK), plain)


def test_who_owns_a_policy(tmp_path: Path) -> None:
    assert registry.find_modality(policy()).name == "vla"
    assert registry.find_modality(toys.model("llava")).name == "vlm"
    policy().save_pretrained(tmp_path)
    assert registry.find_modality(tmp_path).name == "vla"


def test_a_saved_policy_comes_back(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path / "policy")
    processor().save_pretrained(tmp_path / "policy")
    ours = mmspec.accelerate(
        tmp_path / "policy", "prompt-lookup", unnorm_key="toy", deadline_ms=1e6
    )
    wanted = ours.predict_action(*ASK)
    assert np.array_equal(wanted, fast("plain").predict_action(*ASK))
    ours.save_pretrained(tmp_path / "fast")
    again = mmspec.load(tmp_path / "fast")
    assert again.session.deadline_ms == 1e6
    assert np.array_equal(again.predict_action(*ASK), wanted)


def test_a_policy_that_is_disabled_is_the_model_again() -> None:
    ours = fast("plain")
    ours.disable()
    with pytest.raises(ValueError, match=r"OpenVLA.* itself has no predict_action\(\)"):
        ours.predict_action(*ASK)
    assert Image.fromarray(picture()).size == (64, 48)
