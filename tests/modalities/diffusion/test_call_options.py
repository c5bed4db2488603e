"""Arguments and settings of diffusers pipelines under an exact recipe and a forecast.

The exact recipe runs after `sampler="stochastic"`. Each option gives what the same pictures give
without it; a forecast that skips nothing gives the pipeline's own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from tests.toys.pipelines import build_request, pipeline

STEPS = 6
EXACT: tuple[str, dict[str, Any]] = ("asd", {"sampler": "stochastic"})
FORECAST: tuple[str, dict[str, Any]] = ("taylorseer", {"interval": 2, "warm_up": 1})
FULL: tuple[str, dict[str, Any]] = ("taylorseer", {"interval": 1, "warm_up": 1})
NETWORKS = {"sd": "unet", "pixart": "transformer"}
PROMPTS = ["red", "the letter k on green"]
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.parametrize("recipe", [EXACT, FORECAST, FULL], ids=["exact", "forecast", "full"]),
    pytest.mark.parametrize("name", NETWORKS),
]
Recipe = tuple[str, dict[str, Any]]


def run(pipe: Any, name: str, recipe: Recipe | None, seeds: list[int], **more: Any) -> Tensor:
    """Latents of one call, of the pipeline alone without a recipe."""
    given = {**build_request(name), "num_inference_steps": STEPS, "output_type": "latent", **more}
    given["generator"] = [torch.Generator().manual_seed(seed) for seed in seeds]
    fast = pipe if recipe is None else accelerate(pipe, name, *recipe)
    latents: Tensor = fast(**given).images
    assert recipe is None or fast.last_stats.fallback is None
    return latents


def accelerate(pipe: Any, name: str, recipe: str, options: dict[str, Any]) -> Any:
    """Forecasts of a U-Net, which is no stack of blocks, are of its whole output."""
    whole: dict[str, Any] = (
        {"lite": True} if recipe == "taylorseer" and NETWORKS[name] == "unet" else {}
    )
    return mmspec.accelerate(pipe, recipe, **options, **whole)


def compare(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.std())
    assert scale > 0
    assert_close(found, expected, rtol=1e-4, atol=1e-4 * scale)


def test_several_pictures_per_prompt(name: str, recipe: Recipe) -> None:
    pipe = pipeline(name)
    found = run(pipe, name, recipe, [1, 2], num_images_per_prompt=2)
    compare(found, torch.cat([run(pipe, name, recipe, [seed]) for seed in (1, 2)]))
    assert not torch.allclose(found[0], found[1], atol=1e-2)
    if recipe is FULL:
        compare(found, run(pipe, name, None, [1, 2], num_images_per_prompt=2))


def test_prompts_of_different_lengths(name: str, recipe: Recipe) -> None:
    pipe = pipeline(name)
    found = run(pipe, name, recipe, [1, 1], prompt=PROMPTS)
    compare(found, torch.cat([run(pipe, name, recipe, [1], prompt=[one]) for one in PROMPTS]))
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    if recipe is FULL:
        compare(found, run(pipe, name, None, [1, 1], prompt=PROMPTS))


def test_a_callback_sees_every_step_and_changes_nothing(name: str, recipe: Recipe) -> None:
    pipe = pipeline(name)
    if name == "pixart":
        with pytest.raises((TypeError, ValueError), match="callback_on_step_end"):
            run(pipe, name, recipe, [1], callback_on_step_end=print)
        return
    seen: list[tuple[int, Tensor]] = []

    def watch(_: Any, step: int, __: Any, tensors: dict[str, Tensor]) -> Any:
        seen.append((step, tensors["latents"].clone()))
        return tensors

    found = run(pipe, name, recipe, [1], callback_on_step_end=watch)
    assert torch.equal(found, run(pipe, name, recipe, [1]))
    assert [step for step, _ in seen] == list(range(STEPS))
    assert torch.equal(seen[-1][1], found)


def test_a_network_offloaded_to_the_cpu(name: str, recipe: Recipe) -> None:
    library = pytest.importorskip("accelerate", reason="accelerate, for offloading, is missing")
    pipe = pipeline(name)
    expected = run(pipe, name, recipe, [1])
    library.cpu_offload(getattr(pipe, NETWORKS[name]), torch.device("cpu"))
    compare(run(pipe, name, recipe, [1]), expected)


def test_a_compiled_network(name: str, recipe: Recipe) -> None:
    pipe = pipeline(name)
    expected = run(pipe, name, recipe, [1])
    compiled = torch.compile(getattr(pipe, NETWORKS[name]), backend="eager")
    setattr(pipe, NETWORKS[name], compiled)
    compare(run(pipe, name, recipe, [1]), expected)


def test_a_lora_of_the_network(name: str, recipe: Recipe) -> None:
    peft = pytest.importorskip("peft", reason="peft, for adapters, is missing")
    pipe = pipeline(name)
    plain = run(pipe, name, recipe, [1])
    network = getattr(pipe, NETWORKS[name])
    if not hasattr(network, "add_adapter"):
        pytest.skip(f"{type(network).__name__} takes no adapter")
    targets = ["to_q", "to_v"]
    network.add_adapter(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    found = run(pipe, name, recipe, [1])
    assert not torch.allclose(found, plain, atol=1e-3)
    if recipe is FULL:
        compare(found, run(pipe, name, None, [1]))


@pytest.mark.parametrize("weights", ["weights", "activations"])
def test_a_quantized_network(name: str, recipe: Recipe, weights: str) -> None:
    """Pictures of the quantized pipeline, together and alone."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is missing")
    pipe = pipeline(name)
    plain = run(pipe, name, recipe, [1])
    config = {
        "weights": quantization.Int8WeightOnlyConfig(),
        "activations": quantization.Int8DynamicActivationInt8WeightConfig(),  # per row
    }
    quantization.quantize_(getattr(pipe, NETWORKS[name]), config[weights])
    found = run(pipe, name, recipe, [1, 2], num_images_per_prompt=2)
    assert not torch.allclose(found[:1], plain, atol=1e-3)
    alone = torch.cat([run(pipe, name, recipe, [seed]) for seed in (1, 2)])
    if weights == "weights":  # activations next to a border of rounding differ with the batch
        compare(found, alone)
    if recipe is FULL:
        expected = run(pipe, name, None, [1, 2], num_images_per_prompt=2)
        assert torch.equal(found, expected)
