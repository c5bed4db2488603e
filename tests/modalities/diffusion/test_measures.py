"""The benchmark of pipelines, on tiny ones: counts that are known, times that are positive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import mmspec
from mmspec.bench import Comparison, Row, compare
from mmspec.modalities.common.measures import facts_quality
from mmspec.modalities.diffusion import row_costs
from mmspec.modalities.diffusion.image_distance import (
    compare_images,
    generate_reference,
    has_ink,
    paper_of,
)
from mmspec.modalities.diffusion.measures import (
    OWN,
    SeededPictures,
    _differences_per_image,
    _find_better_control,
    of_requests,
)
from mmspec.modality import RunResult
from mmspec.verifiers.tolerance_window import ToleranceWindow
from tests.covering import limited
from tests.toys.pipelines import build_request, pipeline

STEPS = 6


def compared(name: str, recipe: str, drafter: Any = None, **parts: Any) -> Comparison:
    pipe = pipeline(name)
    work = of_requests(pipe, [{**build_request(name, 1), "num_inference_steps": STEPS}])
    fast = mmspec.accelerate(pipe, recipe, drafter=drafter, **parts)
    return compare("big", {recipe: fast}, work, drafters={recipe: "small"}, repeats=1)


def value(row: Row, name: str) -> float | None:
    return row.qualities[name]["value"] if name in row.qualities else None


def test_an_exact_recipe_is_counted() -> None:
    found = compared("sd", "accelerated-diffusion-carried", window=3)
    plain, mine, own = *found.rows, found.row("pipeline")
    assert (plain.exact, mine.exact) == (True, True)
    assert plain.calls == own.calls == STEPS
    assert plain.network_rows == own.network_rows == 2 * STEPS  # guidance
    assert mine.calls is not None
    assert mine.calls <= STEPS
    assert (mine.network_rows or 0) >= 2 * STEPS
    assert mine.fewer_calls == STEPS / mine.calls
    assert mine.extras["row_costs"][1] == 1
    assert set(mine.extras["row_costs"]) == set(row_costs.STATES)
    assert mine.extras["speedup_from_row_costs"] <= mine.fewer_calls
    assert own.extras == {}
    assert min(row.seconds_per_request or 0 for row in (plain, mine, own)) > 0
    assert mine.qualities == {}
    assert (mine.speedup_end_to_end or 0) > 0
    assert found.environment["scheduler"]


@pytest.mark.parametrize("name", limited(["ddpm", "ddim"], 1))  # with noise, and without
def test_a_window_of_one_saves_nothing_and_loses_nothing(name: str) -> None:
    found = compared(name, "paradigms", window=1)
    row = found.row("paradigms")
    assert (row.calls, row.network_rows, row.fewer_calls) == (STEPS, STEPS, 1)
    assert row.mean_acceptance_length == 1
    assert row.extras["states_per_call"] == 1
    assert (value(row, "relative"), value(row, "psnr")) == (0, None)


def test_a_draft_pipeline_is_raced_too() -> None:
    found = compared("ddpm", "accelerated-diffusion", pipeline("ddpm"), window=4)
    row = found.row("accelerated-diffusion")
    assert row.drafter == "small"
    assert row.draft_acceptance_rate == 1  # it is the target itself
    assert (row.fewer_calls or 0) > 1


def test_forecasts_keep_the_pipeline_s_loop_and_noise() -> None:
    pipe = pipeline("dit")
    work = of_requests(pipe, [{**build_request("dit", 1), "num_inference_steps": STEPS}])
    ways = {name: mmspec.accelerate(pipe, name) for name in ("taylorseer", "asd")}
    found = compare("big", ways, work, repeats=1)  # beside a chain, which has noise of its own
    row = found.row("taylorseer")
    assert row.calls is not None
    assert row.fewer_calls == STEPS / row.calls
    assert 0 < row.extras["skipped work"] < 1 - row.calls / STEPS
    assert row.calls < STEPS
    assert (row.network_rows or 0) < 2 * STEPS
    assert (row.unverified_share or 0) > 0
    assert (value(row, "relative") or 0) > 0
    again = of_requests(pipe, [{**build_request("dit", 1), "num_inference_steps": STEPS}])
    same = mmspec.accelerate(pipe, "taylorseer", interval=1)
    neutral = compare("big", {"taylorseer": same}, again, repeats=1)
    assert value(neutral.rows[1], "relative") == 0


def test_beside_a_lossy_recipe_runs_the_pipeline_in_as_many_steps() -> None:
    pipe = pipeline("dit")
    work = of_requests(pipe, [{**build_request("dit", 1), "num_inference_steps": STEPS}])
    ways = {name: mmspec.accelerate(pipe, name) for name in ("taylorseer", "asd")}
    ways["same"] = mmspec.accelerate(pipe, "taylorseer", interval=1)  # saves nothing
    found = compare("big", ways, work, repeats=1)
    assert [row.recipe for row in found.baselines] == ["pipeline", "pipeline, 3 steps"]
    control = found.row("pipeline, 3 steps")
    assert found.row("taylorseer").calls == control.calls == 3
    assert (control.exact, control.network_rows) == (False, 6)  # guidance
    fewer = {**work.timed[0], "num_inference_steps": 3}
    images = [generate_reference(pipe, request, 0) for request in (work.timed[0], fewer)]
    wanted = compare_images(*images)
    for name in ("relative", "psnr", "psnr_on_ink"):
        assert value(control, name) == pytest.approx(vars(wanted)[name])
    mine = value(found.row("taylorseer"), "psnr_on_ink")
    assert mine is not None
    loses = (value(control, "psnr_on_ink") or 0) > mine
    assert found.row("taylorseer").extras.get("beaten by") == (control.recipe if loses else None)
    assert "beaten by" not in found.row("same").extras
    alone = compare("big", {"seer": ways["taylorseer"]}, work, repeats=1, peers=False)
    assert [row.recipe for row in alone.baselines] == ["pipeline"]


@pytest.mark.exhaustive
def test_a_lossy_recipe_is_measured_image_by_image() -> None:
    """Beside sequential sampling of the same noise."""
    pipe = pipeline("ddpm")
    requests = [{**build_request("ddpm", 2), "num_inference_steps": steps} for steps in (6, 8)]
    work = of_requests(pipe, requests)
    others, found = {"plain": [work.plain.run(one, 0) for one in requests]}, {}
    for tolerance in (0.0, 2.0):
        verifier = ToleranceWindow(tolerance)
        fast = work.fast(mmspec.accelerate(pipe, "paradigms", window=4, verifier=verifier))
        answers = [fast.run(one, 0) for one in requests]
        found[tolerance] = _differences_per_image(answers, others)
    assert found[0.0] == {}  # exact
    each = found[2.0]["per image"]
    assert each["calls"] == [one.calls for one in answers for _ in range(2)]
    for index, (request, image) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        sides = (others["plain"][request], answers[request])
        one = compare_images(*(side.output.pixels[image : image + 1] for side in sides))
        assert one.relative > 0.001
        assert (each["relative"][index], each["psnr"][index]) == (one.relative, one.psnr)
        assert each["psnr_on_ink"][index] == one.psnr_on_ink


def test_a_control_beats_a_recipe_by_nearer_images_in_no_more_steps() -> None:
    def result(calls: int, shift: float) -> list[RunResult]:
        images = np.zeros((1, 16, 16, 3))
        images[:, :8] = 0.5
        return [RunResult(None, 1, calls, False, SeededPictures(images + shift, OWN))]

    others = {
        OWN: result(20, 0),
        "pipeline, 10 steps": result(10, 0.1),
        "pipeline, 5 steps": result(5, 0.2),
        "plain": result(1, 0),
    }
    found = _find_better_control
    assert found(result(10, 0.15), others) == "pipeline, 10 steps"
    assert found(result(9, 0.15), others) is None  # computes less than the nearer one
    assert found(result(5, 0.25), others) == "pipeline, 5 steps"
    assert found(result(10, 0.05), others) is None
    assert found(result(20, 0), others) is None  # the same images


def test_pictures_are_judged_in_order() -> None:
    requests = [{**build_request("ddpm", 2), "num_inference_steps": 2} for _ in range(2)]
    seen: list[Any] = []

    def judge(drawn: Any) -> list[tuple[int, int]]:
        seen.append([picture.shape for picture in drawn])
        return [(1, 2)] * len(drawn)

    pipe = pipeline("ddpm")
    work = of_requests(pipe, requests, (facts_quality(judge),), 2)
    fast = mmspec.accelerate(pipe, "paradigms")
    found = compare("big", {"p": fast}, work, repeats=1, peers=False)
    assert [value(row, "facts right") for row in (*found.rows, *found.baselines)] == [0.5] * 3
    assert seen[0] == seen[1] == [(8, 8, 3)] * 4


def test_costs_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a call takes a second for every state, and the first of each size ten more."""
    clock, seen = [0.0], set[int]()

    def predict(states: torch.Tensor, step: torch.Tensor, row: torch.Tensor) -> None:
        clock[0] += len(states) + 10.0 * (len(states) not in seen)
        seen.add(len(states))

    opening = SimpleNamespace(start=torch.zeros(1, 2), denoiser=SimpleNamespace(predict=predict))
    monkeypatch.setattr(row_costs, "read_clock", lambda device: clock[0])
    assert row_costs._time_calls(cast(Any, opening), (1, 2), 1).seconds == (1.0, 2.0)


def test_costs_are_read_between_those_measured() -> None:
    costs = row_costs.Costs((1, 2, 4), (1.0, 1.5, 3.5))
    assert [costs.at(n) for n in (1, 1.5, 3, 4, 6)] == [1, 1.25, 2.5, 3.5, 5.5]
    assert costs.at(0.5) == 1  # a call has a state at least
    assert costs.relative()[4] == 3.5


def test_distance_by_hand() -> None:
    wanted = np.zeros((2, 12, 12, 3))
    wanted[1] = 1.0
    assert compare_images(wanted, wanted).psnr is None
    found = compare_images(wanted, wanted + 0.1)
    assert found.relative == pytest.approx(0.2)
    assert found.psnr == pytest.approx(20)


def test_ink_is_what_differs_from_the_paper() -> None:
    """Ten of 144 pixels are ink in one image or the other; the paper is off by a little."""
    wanted = np.full((1, 12, 12, 3), 0.9)
    found = wanted + 0.001
    wanted[0, 0, :8] = (0.9, 0.2, 0.2)
    found[0, 0, 2:10] = (0.9, 0.2, 0.2)
    error = (4 * 2 * 0.7**2 + 6 * 0) / (10 * 3)  # two pixels are missing, two are too many
    distance = compare_images(wanted, found)
    assert distance.psnr_on_ink == pytest.approx(-10 * np.log10(error), abs=0.02)
    assert distance.psnr is not None
    assert distance.psnr_on_ink is not None
    assert distance.psnr > distance.psnr_on_ink + 10
    flat = np.full((1, 12, 12, 3), 0.5)
    assert compare_images(flat, flat + 0.01).psnr_on_ink is None


def test_every_image_has_a_paper_of_its_own() -> None:
    black, white = np.zeros((1, 8, 8, 3)), np.ones((1, 8, 8, 3))
    both = np.concatenate((black, white))
    both[:, 0, 0] = 0.5
    assert has_ink(both, paper_of(both)).sum() == 2


def test_structural_similarity_by_hand() -> None:
    """Of flat pictures a, b it is (2 a b + c) / (a^2 + b^2 + c), c = 0.01^2; films are frames."""
    pytest.importorskip("torchmetrics", reason="mmspec[quality] is not installed")
    flat = np.full((1, 4, 16, 16, 3), 0.5)
    assert compare_images(flat, flat).ssim == pytest.approx(1)
    expected = (2 * 0.5 * 0.8 + 1e-4) / (0.5**2 + 0.8**2 + 1e-4)
    assert compare_images(flat, flat + 0.3).ssim == pytest.approx(expected, abs=1e-6)


def test_the_own_call_depends_on_its_seed_alone() -> None:
    pipe, call = pipeline("ddpm"), {"batch_size": 1, "num_inference_steps": 2}
    first, again, other = (generate_reference(pipe, call, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
