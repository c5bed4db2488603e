"""Plots name their rows and axes, and draw spreads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="mmspec[plots] is not installed")
from mmspec.bench import plots
from mmspec.bench.plot_style import open_style, pick_style
from mmspec.tracing.palette import BLUE, SERIES, VERMILION

ROWS = [
    ("eagle-3", 2.9, 2.8, 3.1, 10.0, "exact"),
    ("ugsd", 2.5, 2.4, 2.6, 3.0, "lossy"),
    ("generate", 1.0, 1.0, 1.0, None, "exact"),
]
NAMES = ("recipe", "speed", "least", "most", "acceptance_length", "output")


@pytest.mark.exhaustive
def test_a_ranking_has_a_named_row_per_recipe_with_its_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, Any] = {}

    def look(figure: Any, file: Path) -> None:
        left, right = figure.axes
        shown["rows"] = [one.get_text() for one in left.get_yticklabels()]
        shown["axes"] = [left.get_xlabel(), left.get_ylabel(), right.get_xlabel()]
        shown["ends"] = [
            [part.tolist() for part in bars.lines[2][0].get_segments()] for bars in left.containers
        ]
        shown["colours"] = [bars.lines[0].get_color() for bars in left.containers]
        shown["values"] = [bars.lines[0].get_xdata().tolist() for bars in right.containers]

    monkeypatch.setattr(plots, "save_figure", look)
    points = [
        SimpleNamespace(flat=lambda row=row: dict(zip(NAMES, row, strict=True))) for row in ROWS
    ]
    ranking: Any = SimpleNamespace(points=points)
    plots.plot_ranking(ranking, tmp_path / "ranking.png")
    assert shown["rows"] == [row[0] for row in ROWS]
    assert all(shown["axes"])
    exact, lossy = shown["ends"]
    assert [[round(x, 6) for x, _ in one] for one in exact] == [[2.8, 3.1], [1.0, 1.0]]
    assert [[round(x, 6) for x, _ in one] for one in lossy] == [[2.4, 2.6]]
    assert shown["colours"] == [BLUE, VERMILION]
    assert shown["values"] == [[10.0], [3.0]]  # without the row that has none


def test_series_differ_in_mark_where_colours_repeat() -> None:
    count = len(SERIES)
    assert pick_style(0)["color"] == pick_style(count)["color"]
    assert pick_style(0)["marker"] != pick_style(count)["marker"]


@pytest.mark.exhaustive
def test_the_style_ends_with_its_block() -> None:
    with open_style() as pyplot:
        assert pyplot.rcParams["axes.prop_cycle"].by_key()["color"] == list(SERIES)
        pyplot.figure()
    assert not pyplot.get_fignums()
    assert pyplot.rcParams["axes.prop_cycle"].by_key()["color"] != list(SERIES)
