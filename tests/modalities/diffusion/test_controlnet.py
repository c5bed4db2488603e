"""ControlNet pipelines: the loop gives the output of the pipeline's own call."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from tests.covering import exhaustive, limited
from tests.modalities.sampling import FROZEN, PLAIN, STEPS, check_rows, run_pipeline_alone
from tests.toys.controlnet_pipelines import BUILDERS, build_pipeline
from tests.toys.image_to_image_pipelines import mask

SLOW = ("sd-pooled", "sd-several-guessing", "sdxl-union", "sd3-several", "flux-several", "adapter")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BUILDERS]


def sample(fast: Any, given: dict[str, Any], **more: Any) -> Tensor:
    settings = {"num_inference_steps": STEPS, "output_type": "latent", **given, **more}
    torch.manual_seed(7)  # SD3 draws the latents of its control picture from the global generator
    found: Tensor = fast(**settings)[0]
    return found


@pytest.mark.parametrize("name", limited(exhaustive(NAMES, [*NAMES][::2]), 3))
def test_plain_sampling_is_the_pipelines_own(name: str) -> None:
    pipe, given = build_pipeline(name)
    free = mask().repeat(1, 4, 1, 1)[0] > 0 if name == "sd-inpaint" else None
    expected = run_pipeline_alone(pipe, 1, lambda one: sample(pipe, given, generator=one), free)
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    found = sample(fast, given, generator=torch.Generator().manual_seed(5))
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.std()), rtol=1e-4)
    steps = pipe.num_timesteps if "strength" in given else STEPS
    assert fast.last_stats.target_calls == steps


@pytest.mark.parametrize("name", limited(exhaustive(NAMES, [*NAMES][1::2]), 3))
@torch.no_grad()
def test_states_of_any_steps_are_read_at_once(name: str) -> None:
    """A row gets the arguments of its own step, and residuals of its own state."""
    check_rows(*build_pipeline(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["sd-for-a-stretch", "flux", "adapter-for-a-stretch"])
def test_what_stands_beside_counts(name: str) -> None:
    """Another control image, or none, changes the result; batches are supported."""
    pipe, given = build_pipeline(name)
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    picture = "control_image" if "control_image" in given else "image"
    scale = "adapter" if name.startswith("adapter") else "controlnet"
    found = [
        sample(fast, {**given, **change}, seed=0)
        for change in ({}, {picture: 1 - given[picture]}, {f"{scale}_conditioning_scale": 0.1})
    ]
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    assert not torch.allclose(found[0], found[2], atol=1e-3)
    windows: Any = mmspec.accelerate(pipe, FROZEN)
    again = [sample(windows, {**given, "num_images_per_prompt": 2}, seed=0) for _ in range(2)]
    assert torch.equal(*again)
    assert windows.last_stats.num_draft_tokens > 0


def test_a_control_net_runs_once_per_call() -> None:
    """The ControlNet gets as many states as the network, several per window."""
    pipe, given = build_pipeline("sd")
    seen: dict[str, list[int]] = {"unet": [], "controlnet": []}
    for name, rows in seen.items():
        getattr(pipe, name).register_forward_pre_hook(
            lambda module, args, rows=rows: rows.append(len(args[0]))
        )
    fast: Any = mmspec.accelerate(pipe, FROZEN)
    sample(fast, given, seed=0)
    assert seen["controlnet"] == seen["unet"]
    assert [seen["unet"].pop(0) for _ in range(2)] == [3, 3]  # once: equal rows, other neighbours
    assert max(seen["unet"]) > 2
    assert sum(seen["unet"]) == fast.last_stats.network_rows
    assert len(seen["unet"]) == fast.last_stats.target_calls


@pytest.mark.exhaustive
def test_a_control_net_whose_rows_depend_on_each_other_is_refused() -> None:
    pipe, given = build_pipeline("sd")

    def mix(module: Any, args: Any, output: Any) -> Any:
        return [one + 0.1 * one.mean(0) for one in output[0]], output[1]

    pipe.controlnet.register_forward_hook(mix)
    with pytest.raises(ValueError, match=r"pipe.controlnet predicts .* when other states are in"):
        sample(mmspec.accelerate(pipe, FROZEN), given, seed=0)


def test_a_control_net_that_is_changed_on_its_way_is_refused() -> None:
    """Residuals that the pipeline itself changes cannot be identified from two runs."""
    pipe, given = build_pipeline("sd")

    plain, wrap_output = type(pipe).__call__, pipe.unet

    class Damped(type(pipe)):  # type: ignore[misc]
        @functools.wraps(plain)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            stand_in = self.unet
            self.__dict__["unet"] = Wrapped(stand_in)
            return plain(self, *args, **kwargs)

    class Wrapped:
        config, dtype = wrap_output.config, wrap_output.dtype

        def __init__(self, network: Any) -> None:
            self.network = network

        def __call__(self, *args: Any, mid_block_additional_residual: Tensor, **kwargs: Any) -> Any:
            damped = mid_block_additional_residual.tanh()
            return self.network(*args, mid_block_additional_residual=damped, **kwargs)

    pipe.__class__ = Damped
    with pytest.raises(ValueError, match=r"'mid_block_additional_residual' to its network.*speca"):
        sample(mmspec.accelerate(pipe, PLAIN), given, seed=0)
