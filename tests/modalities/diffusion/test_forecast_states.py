"""Traces of forecasts: the states as images, and the errors of checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from tests.modalities.diffusion.test_forecast_runner import RECIPES
from tests.toys.pipelines import build_request, pipeline
from tests.tracing.test_views import read_image

STEPS = 6
PIPELINES = ["ddpm", "dit", "pixart", "sd3", "flux", "sd", "sdxl"]


def trace_call(pipe: Any, name: str, recipe: str, **parts: Any) -> tuple[mmspec.Trace, Any, Any]:
    fast: Any = mmspec.accelerate(pipe, recipe, **parts)
    trace = mmspec.Trace()
    request = {**build_request(name, 2), "num_inference_steps": STEPS, "seed": 0}
    return trace, fast(**request, trace=trace), fast.last_stats


@pytest.mark.parametrize(
    "name",
    [one if one == "dit" else pytest.param(one, marks=pytest.mark.exhaustive) for one in PIPELINES],
)
def test_the_last_state_is_the_image_of_the_call(name: str) -> None:
    parts = {"interval": 2, "warm_up": 1, "lite": True}
    pipe = pipeline(name)
    trace, output, _ = trace_call(pipe, name, "taylorseer", **parts)
    before, scheduler = torch.get_rng_state(), pipe.scheduler
    view = trace.header["views"]["denoising"]
    assert torch.equal(torch.get_rng_state(), before)
    assert pipe.scheduler is scheduler
    assert view["steps"] == STEPS == len(trace.rounds)
    assert view["timesteps"] == [round(float(one), 1) for one in scheduler.timesteps]
    assert len(view["latents"]) == 2
    for row, latents in enumerate(view["latents"]):
        assert [one["step"] for one in latents] == list(range(1, STEPS + 1))
        last, first = (read_image(latents[at]["image"]) for at in (-1, 0))
        assert list(last.getdata()) == list(output.images[row].convert("RGB").getdata())
        assert list(last.getdata()) != list(first.getdata())
    assert [one["rows"][0]["accepted"] for one in trace.rounds] == [0, 1] * (STEPS // 2)
    assert trace.rounds[1]["rows"][0]["draft"] == [2]  # steps are counted from 1


def test_errors_of_checked_forecasts_are_shown_with_their_limits() -> None:
    trace, _, stats = trace_call(pipeline("dit"), "dit", "speca", **RECIPES["speca"])
    checks = trace.header["views"]["denoising"]["checks"]
    errors = [(int(step) - 1, pair) for row in checks for step, pair in row.items()]
    assert sorted(step for step, _ in errors) == sorted(step for step, _ in stats.forecast_errors)
    known = {float(f"{error:.4g}") for _, error in stats.forecast_errors}
    assert {error for _, (error, _) in errors} == known
    for row, own in enumerate(checks):
        for step, (error, limit) in own.items():
            shown = trace.rounds[int(step) - 1]["rows"][row]
            assert shown["draft"] == [int(step)]
            assert (shown["accepted"] == 0) == (error > limit)
