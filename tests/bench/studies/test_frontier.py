"""The frontier of lossy recipes beside plain sampling in fewer steps."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import diffusers
import pytest

import mmspec
from mmspec.bench.row import Row
from mmspec.bench.studies.frontier import (
    LATENT_OPTIONS,
    PLAIN,
    Frontier,
    FrontierPoint,
    _find_better,
    measure_frontier,
)
from mmspec.modalities.diffusion.measures import of_requests
from tests.toys.pipelines import pipeline


def _point(recipe: str, value: float, work: float, distance: float | None) -> FrontierPoint:
    return FrontierPoint(recipe, "steps", value, Row(recipe), work, distance)


def test_a_point_is_beaten_by_the_fewest_steps_that_do_no_more_and_come_nearer() -> None:
    plain = [_point(PLAIN, n, n / 10, 10.0 + n) for n in (3, 5, 7)]
    assert _find_better(_point("speca", 1, 0.6, 12.0), plain) == 3
    assert _find_better(_point("speca", 1, 0.6, 14.0), plain) == 5
    assert _find_better(_point("speca", 1, 0.6, 15.5), plain) is None  # 7 steps do more
    assert _find_better(_point("speca", 1, 0.2, 5.0), plain) is None
    assert _find_better(_point("speca", 1, 0.9, None), plain) is None  # equal images
    assert _find_better(plain[0], plain) is None


def _measure(*chosen: str) -> Frontier:
    pipe = pipeline("dit")
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler()

    def accelerated(name: str, **parts: Any) -> Any:
        return mmspec.accelerate(pipe, name, **parts)

    work = of_requests(pipe, [{"class_labels": [3], "num_inference_steps": 10}])
    return measure_frontier(chosen, accelerated, work)


@pytest.mark.exhaustive
def test_points_have_calls_work_and_distance(tmp_path: Path) -> None:
    found = _measure("taylorseer", "pab", "paradigms")
    options = {n: LATENT_OPTIONS[n] for n in ("taylorseer", "taylorseer, lite", "pab", "paradigms")}
    expected = [(name, value) for name, option in options.items() for value in option.values]
    assert [(one.recipe, one.value) for one in found.points][: len(expected)] == expected
    plain = [one for one in found.points if one.recipe == PLAIN]
    assert [one.value for one in plain] == [one.row.calls for one in plain]

    def share(one: Any) -> float:  # of the steps
        return float(one.row.calls) / 10

    assert [one.work for one in plain] == pytest.approx([share(one) for one in plain])
    lite = [one for one in found.points if one.recipe == "taylorseer, lite"]
    assert [one.work for one in lite] == pytest.approx([share(one) for one in lite])
    assert all((one.work or 0) > share(one) for one in found.points if one.recipe == "pab")
    found.write_csv(tmp_path / "points.csv")
    with (tmp_path / "points.csv").open() as opened:
        assert len(list(csv.DictReader(opened))) == len(found.points)
    pytest.importorskip("matplotlib")
    from mmspec.bench.plots import plot_frontier

    plot_frontier(found, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_a_recipe_without_an_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"asd: no option is known; recipes with one: taylorseer"):
        _measure("asd")
