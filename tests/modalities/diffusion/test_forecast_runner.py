"""Steps of pipelines with forecasts are rounds, which change nothing of the call."""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import pytest
import torch

import mmspec
from mmspec.modalities.diffusion.forecast_runner import GlobalNoise
from tests.covering import exhaustive
from tests.toys.pipelines import build_request, pipeline

REQUEST = {**build_request("dit", 2), "num_inference_steps": 8, "guidance_scale": 2.0}
REQUEST |= {"output_type": "pt", "seed": 3}
RECIPES: dict[str, dict[str, Any]] = {
    "taylorseer": {"interval": 3},
    "speca": {"base": 0.2, "floor": 0.05, "least": 1},
    "first-block-cache": {"threshold": 3.0},
}


@pytest.mark.parametrize("recipe", exhaustive(RECIPES, ["speca"]))
def test_every_step_is_a_round_and_changes_nothing(recipe: str) -> None:
    pipe, seen = pipeline("dit"), list[mmspec.draft.Round]()
    fast: Any = mmspec.accelerate(pipe, recipe, **RECIPES[recipe])
    alone = fast(**REQUEST).images
    counted = fast.last_stats

    def watch(one: mmspec.draft.Round) -> None:
        seen.append(one)
        torch.rand(3)

    shown = fast(**REQUEST, on_round=watch).images
    assert torch.equal(shown, alone)
    assert fast.last_stats == counted
    assert "step" not in vars(pipe.scheduler)
    assert [one.index for one in seen] == list(range(8))
    assert all(len(one.tokens) == len(one.accepted) == 2 for one in seen)
    own = 1 if recipe != "speca" else 2  # rows that are judged alone
    accepted = sum(sum(one.accepted[:own]) for one in seen)
    refused = sum(sum(one.drafted[:own]) for one in seen) - accepted
    assert accepted == counted.num_accepted_draft_tokens > 0
    assert refused == counted.num_draft_tokens - counted.num_accepted_draft_tokens
    assert (refused > 0) == (recipe == "speca")
    assert [one.calls for one in seen if not all(one.accepted)].count(0) == 0
    assert {one.calls for one in seen if all(one.accepted)} == {0}


def test_a_stream_yields_the_steps_and_returns_the_output() -> None:
    fast: Any = mmspec.accelerate(pipeline("dit"), "taylorseer", interval=3)
    alone, stream = fast(**REQUEST).images, fast.stream(**REQUEST)
    rounds = []
    for _ in range(8):
        torch.rand(1)  # the reader's own noise is no part of the call
        rounds.append(next(stream))
    with pytest.raises(StopIteration) as end:
        next(stream)
    assert torch.equal(end.value.value.images, alone)
    assert [one.index for one in rounds] == list(range(8))


@pytest.mark.exhaustive
def test_a_copy_of_the_scheduler_is_not_shown() -> None:
    pipe = pipeline("dit")
    forward, seen = pipe.transformer.forward, list[int]()

    @wraps(forward)
    def call_copy(*args: Any, **kwargs: Any) -> Any:
        twin = copy.deepcopy(pipe.scheduler)  # as pipelines with two modalities have one
        state = args[0]
        twin.step(state[:, :4], twin.timesteps[0], state)
        return forward(*args, **kwargs)

    pipe.transformer.forward = call_copy
    fast: Any = mmspec.accelerate(pipe, "taylorseer", interval=3)
    fast(**REQUEST, on_round=lambda one: seen.append(one.index))
    assert seen == list(range(8))


def test_a_network_call_behind_the_last_step_is_refused() -> None:
    pipe = pipeline("dit")
    decode = pipe.vae.decode

    def call_again(latents: Any, **given: Any) -> Any:
        count = len(latents)
        pipe.transformer(
            torch.cat([latents] * 2),
            timestep=torch.zeros(2 * count),
            class_labels=torch.zeros(2 * count).long(),
        )
        return decode(latents, **given)

    pipe.vae.decode = call_again
    fast: Any = mmspec.accelerate(pipe, "taylorseer", interval=3)
    fast(**REQUEST)
    with pytest.raises(ValueError, match=r"called 1 times without a step .*drop on_round=, trace="):
        fast(**REQUEST, trace=mmspec.Trace())
    assert "step" not in vars(pipe.scheduler)


def test_noise_of_others_and_of_the_call_do_not_meet() -> None:
    torch.manual_seed(1)
    first, second = torch.rand(2), torch.rand(2)
    torch.manual_seed(9)
    own = torch.rand(4)
    torch.manual_seed(1)
    noise = GlobalNoise(9)
    with noise:
        drawn = [torch.rand(2)]
        with noise.pause():
            assert torch.equal(torch.rand(2), first)
        drawn.append(torch.rand(2))
    assert torch.equal(torch.cat(drawn), own)
    assert torch.equal(torch.rand(2), second)


def test_another_call_of_the_pipeline_within_a_stream_is_refused() -> None:
    pipe = pipeline("dit")
    stream: Any = mmspec.accelerate(pipe, "taylorseer", interval=3).stream(**REQUEST)
    next(stream)
    with pytest.raises(ValueError, match="called while a round of it is shown"):
        pipe(**{name: value for name, value in REQUEST.items() if name != "seed"})
    stream.close()
    assert "step" not in vars(pipe.scheduler)
