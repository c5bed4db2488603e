"""The benchmark of pipelines, on tiny ones: counts that are known, times that are positive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmspec.bench import rows
from mmspec.bench.latents import Drawing, LatentComparison, compare_latents
from mmspec.bench.pictures import apart, own_pictures
from tests.toys.pipelines import asked, pipeline

STEPS = 6


def compared(name: str, recipe: str, **settings: Any) -> LatentComparison:
    requests = [{**asked(name, 1), "num_inference_steps": STEPS}]
    return compare_latents(pipeline(name), recipe, Drawing(requests), repeats=1, **settings)


def test_an_exact_recipe_is_counted() -> None:
    found = compared("sd", "accelerated-diffusion-carried", window=3)
    assert found.exact
    assert found.steps == found.calls_plain == STEPS
    assert found.rows_plain == 2 * STEPS  # guidance
    assert found.calls <= STEPS
    assert found.rows >= found.rows_plain
    assert found.calls_saved == 1 - found.calls / STEPS
    assert found.speedup_if_rows_were_free == STEPS / found.calls
    assert found.row_costs[1] == 1
    assert set(found.row_costs) == set(rows.STATES)
    assert found.speedup_from_row_costs is not None
    assert found.speedup_from_row_costs <= found.speedup_if_rows_were_free
    assert min(found.seconds_per_request.values()) > 0
    assert (found.relative_distance, found.quality_method) == (None, None)


def test_a_window_of_one_saves_nothing_and_loses_nothing() -> None:
    found = compared("ddpm", "paradigms", window=1)
    assert (found.calls, found.rows, found.calls_saved) == (STEPS, STEPS, 0)
    assert found.mean_acceptance_length == 1
    assert found.states_per_call == 1
    assert (found.relative_distance, found.psnr) == (0, None)


def test_a_draft_pipeline_is_raced_too() -> None:
    found = compared(
        "ddpm",
        "accelerated-diffusion",
        drafter=pipeline("ddpm"),
        names=("big", "small"),
        window=4,
    )
    assert found.drafter == "small"
    assert found.draft_acceptance_rate == 1  # it is the target itself
    assert found.calls < STEPS


def test_forecasts_keep_the_pipeline_s_loop() -> None:
    found = compared("dit", "taylorseer")
    assert found.speedup_over_plain is None
    assert found.calls < found.calls_plain == STEPS
    assert found.rows < found.rows_plain == 2 * STEPS
    assert found.row_costs == {}
    assert found.relative_distance is not None
    assert found.relative_distance > 0


def test_pictures_are_judged_in_order() -> None:
    requests = [{**asked("ddpm", 2), "num_inference_steps": 2} for _ in range(2)]
    seen: list[Any] = []

    def judge(drawn: Any) -> float:
        seen.append([picture.shape for picture in drawn])
        return 0.5

    drawing = Drawing(requests, "facts", judge)
    found = compare_latents(pipeline("ddpm"), "paradigms", drawing, repeats=1)
    assert (found.quality_metric, found.quality_pipeline, found.quality_method) == (
        "facts",
        0.5,
        0.5,
    )
    assert seen[0] == seen[1] == [(2, 8, 8, 3)] * 2


def test_costs_are_read_between_those_measured() -> None:
    costs = rows.Costs((1, 2, 4), (1.0, 1.5, 3.5))
    assert [costs.at(n) for n in (1, 1.5, 3, 4, 6)] == [1, 1.25, 2.5, 3.5, 5.5]
    assert costs.at(0.5) == 1  # a call has a state at least
    assert costs.relative()[4] == 3.5


def test_distance_by_hand() -> None:
    wanted = np.array([0.0, 1.0])
    assert apart(wanted, wanted).psnr is None
    found = apart(wanted, wanted + 0.1)
    assert found.relative == pytest.approx(0.2)
    assert found.psnr == pytest.approx(20)


def test_the_own_call_depends_on_its_seed_alone() -> None:
    pipe, call = pipeline("ddpm"), {"batch_size": 1, "num_inference_steps": 2}
    first, again, other = (own_pictures(pipe, call, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
