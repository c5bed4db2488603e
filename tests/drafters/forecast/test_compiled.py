"""Forecasts on compiled networks: the same images, and no compilation per step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import mmspec
from tests.drafters.forecast.networks import PIPELINES
from tests.drafters.forecast.networks import draw as ask
from tests.modalities.sampling import draw as sample
from tests.toys.pipelines import pipeline

RECIPES: dict[str, dict[str, Any]] = {
    "taylorseer": {"interval": 3},
    "taylorseer-lite": {"interval": 3, "lite": True},
    "speca": {},
    "first-block-cache": {"threshold": 0.5},
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw_image(pipe: Any, recipe: str) -> tuple[Tensor, Any]:
    """A call of the pipeline under a recipe, which `ask` makes of whatever is called."""
    fast: Any = mmspec.accelerate(pipe, recipe.removesuffix("-lite"), **RECIPES[recipe])
    found = ask(pipe, calling=fast)
    return found, fast.last_stats


def frames_of(name: str, recipe: str, first: int) -> list[int]:
    """Graphs compiled after `first` plain calls of the pipeline, then after each of three calls."""
    pipe = PIPELINES[name]()
    expected, counts = draw_image(pipe, recipe)
    counter = CompileCounter()
    pipe.transformer = torch.compile(pipe.transformer, backend=counter)
    for _ in range(first):
        ask(pipe)
    frames = [counter.frame_count]
    for _ in range(3):
        found, stats = draw_image(pipe, recipe)
        frames.append(counter.frame_count)
        assert torch.equal(found, expected)
        assert stats.target_calls == counts.target_calls
        assert stats.unverified_tokens == counts.unverified_tokens > 0
    return frames


@pytest.mark.exhaustive
def test_layers_are_compiled_once() -> None:
    """Attention and feed-forward of three blocks: two graphs, for all steps of all calls."""
    assert frames_of("dit", "taylorseer", 0) == [0, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("recipe", ["taylorseer", "taylorseer-lite", "speca"])
def test_forecasts_stay_compiled(name: str, recipe: str) -> None:
    """The first call compiles the layers, or nothing that was not compiled; the others nothing."""
    own, first, *others = frames_of(name, recipe, 1)
    assert (own == first) is (recipe == "taylorseer-lite")
    assert set(others) == {first}


def test_layers_compile_with_the_options_of_their_network() -> None:
    """fullgraph=True applies to the network, so to its layers; here to one with a graph break."""
    pipe = PIPELINES["dit"]()
    attention = pipe.transformer.transformer_blocks[0].attn1
    layer = attention.forward

    def fail(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return layer(*args, **kwargs)

    attention.forward = fail
    pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="graph_break"):
        draw_image(pipe, "taylorseer")


def test_what_is_remembered_is_not_written_over() -> None:
    """Compiled code may reuse the memory of its output, as CUDA graphs do."""
    pipe = PIPELINES["dit"]()
    expected, _ = draw_image(pipe, "taylorseer-lite")
    network, kept = pipe.transformer, list[Tensor]()

    def count_in_place(*args: Any, **kwargs: Any) -> Any:
        output = network(*args, **kwargs)
        kept[:] = kept or [output.sample.clone()]
        output.sample = kept[0].copy_(output.sample)
        return output

    pipe.transformer = torch.compile(network, backend="eager")
    pipe.transformer.forward = count_in_place
    assert torch.equal(draw_image(pipe, "taylorseer-lite")[0], expected)


@pytest.mark.slow
def test_networks_compiled_in_place() -> None:
    """As a whole they are what they are; their layers cannot be reached."""
    pipe = PIPELINES["dit"]()
    expected, _ = draw_image(pipe, "taylorseer-lite")
    counter = CompileCounter()
    pipe.transformer.compile(backend=counter)
    ask(pipe)
    before = pipe.transformer._compiled_call_impl
    assert torch.equal(draw_image(pipe, "taylorseer-lite")[0], expected)
    assert counter.frame_count == 1
    assert pipe.transformer._compiled_call_impl is before
    with pytest.raises(ValueError, match=r"compiled in place.*= torch\.compile\(pipe\.tr"):
        draw_image(pipe, "speca")
    pipe.transformer._compiled_call_impl = None
    pipe.transformer.transformer_blocks[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"transformer_blocks\.1 of the network is compiled in pl"):
        draw_image(pipe, "speca")
    assert torch.equal(draw_image(pipe, "taylorseer-lite")[0], expected)


@pytest.mark.slow
def test_the_cache_of_diffusers_is_compiled_once() -> None:
    pipe, counter = PIPELINES["dit"](), CompileCounter()
    expected, _ = draw_image(pipe, "first-block-cache")
    pipe.transformer = torch.compile(pipe.transformer, backend=counter)
    frames = []
    for _ in range(2):
        assert torch.equal(draw_image(pipe, "first-block-cache")[0], expected)
        frames.append(counter.frame_count)
    assert frames[0] == frames[1]


def test_layers_compiled_in_place_are_refused() -> None:
    pipe = PIPELINES["dit"]()
    pipe.transformer.transformer_blocks[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"transformer_blocks\.1 of the network is compiled in pl"):
        draw_image(pipe, "speca")


@pytest.mark.slow
def test_chains_compile_their_network_for_one_row_and_for_many() -> None:
    pipe, counter, rows = pipeline("dit"), CompileCounter(), list[int]()
    expected = sample(mmspec.accelerate(pipe, "asd"), "dit", 1, seed=0, num_inference_steps=20)
    pipe.transformer.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    pipe.transformer = torch.compile(pipe.transformer, backend=counter)
    fast: Any = mmspec.accelerate(pipe, "asd")
    for seed in (0, 1):
        found = sample(fast, "dit", 1, seed=seed, num_inference_steps=20)
        assert torch.equal(found, expected) is (seed == 0)
        assert counter.frame_count == 2
    assert len(set(rows)) > 3
