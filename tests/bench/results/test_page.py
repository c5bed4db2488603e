"""The page: every line in Markdown, CSV and JSON, and what moved since another run."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmspec.bench.plots import plot_section
from mmspec.bench.results.lines import Line
from mmspec.bench.results.page import Page, Section, count_repeated, find_moves, read_page
from mmspec.tracing.palette import BLUE, GREY

FIGURES: dict[str, Any] = {
    **{"is_system": True, "promise": "exact", "drafter": "zoo:head", "trained": "here: 9 min"},
    **{"acceptance_length": 3.25, "fewer_calls": 3.0, "fewer_calls_error": 0.5},
    **{"speed": 1.5, "least": 1.4, "most": 1.6, "rank": "1", "headline": "≤ 3.15x", "best": 3.15},
    **{"quality": "facts right", "value": 0.97, "error": 0.01, "plain_value": 0.96},
}
SYSTEM = Line("vlm", "HiViS", "zoo:llava", "hivis", **FIGURES, differs="drafter")
LOST = Line("vlm", "SV", "zoo:llava", headline="not found", note="drafts | are\nanswers")
BASELINE = Line("vlm", "generate", "zoo:llava", promise="exact", speed=1.0, least=1.0, most=1.0)


def page(*lines: Line) -> Page:
    return Page((Section("vlm", "Vision-language", "zoo:llava", "4 requests", lines),), "mmspec x")


def test_all_lines_are_in_all_three_files(tmp_path: Path) -> None:
    found = page(SYSTEM, BASELINE, LOST)
    found.write(tmp_path / "results.md", None, {"vlm": "results-vlm.svg"})
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert (
        "| 1 | HiViS | exact | zoo:head; here: 9 min |  | 3.25 | 3.00 ± 0.50 | 1.50x | 1.40 | 1.60 "
        "| facts right 0.970 ± 0.010 (plain 0.960) | ≤ 3.15x | drafter |" in text
    )
    assert "| *generate* | exact |  |" in text
    assert "- SV: drafts / are answers" in text
    assert "](results-vlm.svg)" in text
    with (tmp_path / "results.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["name"] for row in rows] == ["HiViS", "generate", "SV"]
    assert float(rows[0]["fewer_calls_error"]) == 0.5
    read: dict[str, Any] = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert Line(**read["sections"][0]["lines"][0]) == SYSTEM


def test_a_row_without_a_speed_was_run_if_it_has_a_quality() -> None:
    judged = Line("vlm", "alone", "zoo:llava", promise="lossy", quality="facts right", value=0.5)
    text = page(judged, LOST).markdown(None, {})
    assert "|  | *alone* | lossy |  |  |  |  |  |  |  | facts right 0.500 |  |  |" in text
    assert text.count("not run |") == 1


def test_a_row_moved_if_its_spreads_do_not_overlap(tmp_path: Path) -> None:
    page(SYSTEM, BASELINE, LOST).write(tmp_path / "old.md", None, {})
    before = read_page(tmp_path / "old.json")
    within = replace(SYSTEM, speed=1.7, least=1.55, most=1.8)
    beyond = replace(SYSTEM, speed=1.7, least=1.65, most=1.8)
    assert find_moves(before, page(within, BASELINE)) == []
    (move,) = find_moves(before, page(beyond, BASELINE, LOST))
    assert (move.before, move.after) == ("1.50x (1.40 to 1.60)", "1.70x (1.65 to 1.80)")
    assert count_repeated(before, page(beyond, BASELINE, LOST)) == 2
    page(beyond).write(tmp_path / "new.md", before, {})
    assert "| vlm | HiViS | 1.50x" in (tmp_path / "new.md").read_text(encoding="utf-8")


def test_a_note_stands_before_the_sections() -> None:
    noted = replace(page(SYSTEM), note="Measured on one core of two.")
    assert "```\n\nMeasured on one core of two.\n\n## Vision" in noted.markdown(None, {})
    assert "```\n\n## Vision" in page(SYSTEM).markdown(None, {})


def test_another_file_is_no_page(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match="is no page of results; give the"):
        read_page(tmp_path / "a.json")


@pytest.mark.exhaustive
def test_spreads_and_the_papers_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (section,) = page(SYSTEM, BASELINE, LOST).sections
    plot_section(section, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    missing = [colour for colour in (BLUE, GREY, "#000000") if colour not in drawn]
    assert not missing
