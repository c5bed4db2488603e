"""Rankings: the fastest first, written as CSV and Markdown, with what was skipped."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mmspec.bench.compare import Comparison
from mmspec.bench.ranking import TITLES, Ranking
from mmspec.bench.row import Row


def compared(*speeds: float | None) -> Comparison:
    rows = [
        Row(f"recipe-{at}", exact=True, speedup_over_plain=speed) for at, speed in enumerate(speeds)
    ]
    baseline = Row("generate", exact=True, speedup_end_to_end=1.5, speedup_over_plain=9.0)
    skipped = Row("assisted", speedup_end_to_end=99.0, skipped="needs a draft model")
    return Comparison("toy", "vlm", rows, [baseline, skipped], [], 4, 2, 0, 1, {"seed": 3}, 0)


def test_the_fastest_is_first_and_what_was_not_timed_is_left_out() -> None:
    found = Ranking.of(compared(1.0, None, 2.0), {})
    assert [point.row.recipe for point in found.points] == ["recipe-2", "generate", "recipe-0"]
    assert [point.speed for point in found.points] == [2.0, 1.5, 1.0]  # over the first baseline


def test_csv_has_a_line_per_recipe(tmp_path: Path) -> None:
    Ranking.of(compared(1.0, 2.0), {}).write(tmp_path / "ranking.csv")
    with (tmp_path / "ranking.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert set(lines[0]) == set(TITLES)
    assert [line["recipe"] for line in lines] == ["recipe-1", "generate", "recipe-0"]
    assert "| 2 | transformers: generate() | 1.50" in Ranking.of(compared(1.0, 2.0), {}).markdown()


@pytest.mark.parametrize("folder", ["", "elsewhere"])
def test_markdown_shows_a_plot_of_its_own_folder(tmp_path: Path, folder: str) -> None:
    file, plot = tmp_path / "ranking.md", tmp_path / folder / "plot.png"
    Ranking.of(compared(1.0), {}).write(file, plot)
    assert ("](plot.png)" in file.read_text(encoding="utf-8")) == (not folder)


def test_equal_reasons_are_grouped() -> None:
    reasons = {"a": "'a' needs actions", "b": "'b' needs actions", "c": "too slow"}
    lines = Ranking.of(compared(1.0), reasons).markdown().splitlines()
    assert lines[-2:] == ["- `a`, `b`: NAME needs actions", "- `c`: too slow"]
    assert "Measured: seed 3; 4 requests, 2 repeats, batch 1; ." in lines


def test_recipes_that_are_no_faster_end_with_what_to_try() -> None:
    found = Ranking.of(compared(1.0, 2.0, 0.5), {})
    names = ["recipe-0", "recipe-1", "recipe-2"]
    slow = "no faster here: recipe-0 (1.00x), recipe-2 (0.50x); try recipe-1 (2.00x)"
    assert found.suggest(names) == slow
    assert found.suggest(["recipe-1", "plain"]) is None
    assert "(`mmspec bench --model toy --recipe all` ranks them)" in str(found.suggest(names[2:]))
