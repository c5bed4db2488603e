"""LeRobot's convention: dictionaries of batched tensors in, one action per row out."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mmspec
from tests.modalities.vla.policies import SIZE, fast, picture, processor
from tests.toys import prismatic

CHUNK = 2
TASKS = ["Reach the red cube", "reach"]


@cache
def chunk_policy() -> Any:
    """A policy that says two actions at a time."""
    return prismatic.openvla(num_actions_chunk=CHUNK)


def make_observation(seed: int = 0, rows: int = 2, **more: Any) -> dict[str, Any]:
    images = [torch.from_numpy(picture(seed + row)).permute(2, 0, 1) / 255 for row in range(rows)]
    return {"observation.images.front": torch.stack(images), "task": TASKS[:rows], **more}


def known(ours: Any) -> Any:
    """Robots 0 and 1, as the policy knows them."""
    return ours.session.robots.access([0, 1], lambda: ours.session.binder.first().space)


def test_an_observation_is_a_question() -> None:
    ours = fast()
    wanted = ours.predict_action([picture(0), picture(1)], TASKS)
    ours.reset()
    found = ours.select_action(make_observation())
    assert isinstance(found, Tensor)
    assert (found.shape, found.dtype) == ((2, SIZE), torch.float32)
    assert np.array_equal(found.numpy(), wanted.astype(np.float32))
    whole = {**make_observation(rows=1), "task": TASKS[0]}
    whole["observation.image"] = whole.pop("observation.images.front")
    whole["observation.image"] = (whole["observation.image"] * 255).round().to(torch.uint8)
    assert np.array_equal(ours.select_action(whole)[0].numpy(), wanted[0].astype(np.float32))


def test_rounding_beyond_the_ends_is_no_other_picture() -> None:
    """Resized pictures overshoot by less than half a grey level."""
    whole, ours = make_observation(rows=1), fast("plain")
    wanted = ours.select_action(whole)
    ours.reset()
    name = "observation.images.front"
    assert torch.equal(ours.select_action({**whole, name: 1.003 * whole[name] - 0.0015}), wanted)
    ours.reset()
    with pytest.raises(ValueError, match="floats in"):
        ours.select_action({**whole, name: 1.02 * whole[name] - 0.01})


def test_every_camera_is_read() -> None:
    ours = fast("plain")
    both = {
        **make_observation(),
        "observation.images.wrist": make_observation(5)["observation.images.front"],
    }
    pairs = [[picture(0), picture(5)], [picture(1), picture(6)]]
    wanted = ours.predict_action(pairs, TASKS).astype(np.float32)
    ours.reset()
    assert np.array_equal(ours.select_action(both).numpy(), wanted)


def test_a_chunk_is_handed_out_action_by_action() -> None:
    ours = mmspec.accelerate(chunk_policy(), "prompt-lookup", processor=processor())
    plain = mmspec.accelerate(chunk_policy(), "plain", processor=processor())
    wanted = plain.predict_action([picture(0), picture(1)], TASKS)
    assert wanted.shape == (2, CHUNK, SIZE)
    assert np.array_equal(ours.predict_action(picture(0), TASKS[0]), wanted[0])
    ours.reset()
    for step in range(CHUNK):  # the second is what was said about the first picture
        found = ours.select_action(make_observation(10 * step)).numpy()
        assert np.array_equal(found, wanted[:, step].astype(np.float32))
    assert len(ours.steps(0)) == 1
    ours.select_action(make_observation(20))
    assert len(ours.steps(0)) == 2
    ours.reset()  # the rest of the chunk is forgotten
    assert np.array_equal(
        ours.select_action(make_observation()).numpy(), wanted[:, 0].astype(np.float32)
    )


def test_the_rest_of_a_chunk_that_nobody_carries_out_is_not_remembered() -> None:
    ours = mmspec.accelerate(chunk_policy(), "plain", processor=processor())
    ours.select_action(make_observation())
    ours.reset(robots=[1])  # so that both are asked anew, robot 0 in the middle of its chunk
    ours.select_action(make_observation(3))
    with known(ours) as robots:
        assert [one.episode.step for one in robots] == [1, 0]


def test_states_are_what_the_action_before_led_to() -> None:
    ours = mmspec.accelerate(chunk_policy(), "plain", processor=processor())
    given = [
        ours.select_action(
            make_observation(step) | {"observation.state": torch.full((2, 3), float(step))}
        )
        for step in range(4)
    ]
    with known(ours) as robots:
        for row, robot in enumerate(robots):
            done = torch.stack(robot.episode.actions)
            units = robot.episode.space.unnormalise(done).float()
            assert torch.allclose(units, torch.stack(given[:3])[:, row], atol=1e-6)
            assert [one.tolist() for one in robot.episode.states] == [[n] * 3 for n in (1, 2, 3)]
