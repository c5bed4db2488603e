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


@pytest.mark.parametrize("name", ["ddpm", "ddim"])  # with noise, and without
def test_a_window_of_one_saves_nothing_and_loses_nothing(name: str) -> None:
    found = compared(name, "paradigms", window=1)
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
    wanted = np.zeros((2, 12, 12, 3))
    wanted[1] = 1.0
    assert apart(wanted, wanted).psnr is None
    found = apart(wanted, wanted + 0.1)
    assert found.relative == pytest.approx(0.2)
    assert found.psnr == pytest.approx(20)


def test_structural_similarity_by_hand() -> None:
    """Of flat pictures a, b it is (2 a b + c) / (a^2 + b^2 + c), c = 0.01^2; films are frames."""
    pytest.importorskip("torchmetrics", reason="mmspec[quality] is not installed")
    flat = np.full((1, 4, 16, 16, 3), 0.5)
    assert apart(flat, flat).ssim == pytest.approx(1)
    expected = (2 * 0.5 * 0.8 + 1e-4) / (0.5**2 + 0.8**2 + 1e-4)
    assert apart(flat, flat + 0.3).ssim == pytest.approx(expected, abs=1e-6)


def test_the_own_call_depends_on_its_seed_alone() -> None:
    pipe, call = pipeline("ddpm"), {"batch_size": 1, "num_inference_steps": 2}
    first, again, other = (own_pictures(pipe, call, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
