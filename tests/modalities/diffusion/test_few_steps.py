"""What a recipe cannot save is said once, before the pipeline runs."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest

import mmspec
from mmspec.modalities.diffusion.few_steps import count_steps
from mmspec.targets.continuous.forecast_schedule import DecayingThreshold
from mmspec.verifiers.cached_steps import AccumulatedChangeGate, BroadcastGate, MagnitudeGate
from mmspec.verifiers.first_block import FirstBlockGate
from mmspec.verifiers.forecast_gate import ForecastGate, fixed_cadence
from tests.toys.pipelines import build_request, pipeline


@pytest.mark.parametrize(
    ("name", "steps", "part"),
    [
        ("taylorseer", 4, "calls the network at least 3 times in 4 steps"),
        ("taylorseer", 3, "skips none of 3 steps"),
        ("taylorseer", 8, None),
        ("asd", 4, "calls the network at least 3 times in 4 steps"),
        ("asd", 8, None),
    ],
)
def test_few_steps_are_warned_of_once_and_before(
    name: str, steps: int, part: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = pipeline("dit")
    fast: Any = mmspec.accelerate(pipe, name)
    seen: list[int] = []
    pipe.transformer.register_forward_pre_hook(lambda *_: seen.append(len(caplog.messages)))
    for seed in range(2):
        request = build_request("dit", 1)
        fast(**request, num_inference_steps=steps, output_type="latent", seed=seed)
    found = [one for one in caplog.messages if "steps" in one]
    assert len(found) == (part is not None)
    assert all((part or "") in one for one in found)
    assert seen[0] == len(caplog.messages)
    # what was said is a lower bound
    assert fast.last_stats.target_calls >= fast.session.runner.count_fewest(steps)


KINDS = ("carried", "corrected", "frozen")
EXACT = ("asd", "asd-tree", "block-diffusion", *(f"accelerated-diffusion-{one}" for one in KINDS))
CACHES = ("first-block-cache", "sea-cache", "pab", "speca", "taylorseer", "paradigms")
MEASURING = ("mag-cache", "tea-cache")  # in their first call


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [4, 8])
@pytest.mark.parametrize("name", [*EXACT, *CACHES, *MEASURING])
def test_every_recipe_saves_calls_in_few_steps_or_says_why_not_once(
    name: str, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In 4 steps exact recipes and fixed cadences say before that they can save little."""
    pipe, said = pipeline("dit"), list[int]()
    fast: Any = mmspec.accelerate(pipe, name)
    pipe.transformer.register_forward_pre_hook(lambda *_: said.append(len(caplog.messages)))
    calls = list[int]()
    for seed in range(2):
        least = fast.session.runner.count_fewest(steps)
        request = build_request("dit", 1)
        fast(**request, num_inference_steps=steps, output_type="latent", seed=seed)
        calls.append(fast.last_stats.target_calls)
        assert least <= calls[-1] <= steps
        assert fast.last_stats.num_new_tokens == steps
    can_save = 2 * least <= steps
    assert (said[0] == 1) == (not can_save)  # before the run
    is_measured = name in MEASURING and len(fast.saved_parts) == 1
    assert len(caplog.messages) <= 1 + is_measured
    if calls[-1] == steps and name not in (*EXACT, "paradigms"):
        assert caplog.messages  # before, or after, where the images decide
    if is_measured:
        assert "computed every step of this call, to measure the network" in caplog.messages[0]


def test_a_distilled_model_is_not_asked_for_fifty_steps(caplog: pytest.LogCaptureFixture) -> None:
    pipe = pipeline("dit")
    pipe.scheduler = diffusers.LCMScheduler()
    fast: Any = mmspec.accelerate(pipe, "taylorseer")
    request = build_request("dit", 1)
    fast(**request, num_inference_steps=10, output_type="latent", seed=0)
    assert ["distilled to few steps, and 10 are asked for" in one for one in caplog.messages] == [
        True
    ]


def test_the_fewest_full_steps_of_every_gate() -> None:
    assert fixed_cadence(4, 3).count_fewest(28) == 9
    assert fixed_cadence(1, 1).count_fewest(7) == 7
    assert ForecastGate(DecayingThreshold(least=0, most=3, warm_up=1)).count_fewest(8) == 2
    assert FirstBlockGate(0.1).count_fewest(8) == 1
    assert MagnitudeGate(0.1, 3, 0.25).count_fewest(8) == 3
    assert AccumulatedChangeGate(0.1, 2, 1).count_fewest(8) == 4
    assert AccumulatedChangeGate(0.1, 0, 1).count_fewest(8) == 2
    assert BroadcastGate().count_fewest(8) == 1


def test_steps_are_counted_from_the_arguments() -> None:
    assert count_steps({"num_inference_steps": 20}) == 20
    assert count_steps({"num_inference_steps": 20, "timesteps": [9, 5, 1]}) == 3
    assert count_steps({"num_inference_steps": 20, "strength": 0.5, "image": object()}) == 10
    assert count_steps({"num_inference_steps": 20, "strength": 0.5}) == 20
    assert count_steps({"num_inference_steps": 20, "timesteps": 5}) == 20  # refused by the pipeline
    assert count_steps({}) is None
