"""`mmspec bench results`: it lists, measures once, resumes, and refuses what it cannot read."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmspec.bench.compare import Comparison
from mmspec.bench.results.categories import CategoryTable
from mmspec.bench.results.lines import Line
from mmspec.bench.results.page import Page, Section, keep_sections, read_page
from mmspec.bench.results.records import Effort, Record, Store, describe
from mmspec.bench.results.systems import Job, System, plan, read_groups, select
from mmspec.bench.row import Row
from mmspec.cli import results as command
from tests.cli.running import fail, run

QUICK = ("--prompts", "1", "--repeats", "1")


def test_a_dry_run_lists_every_row_with_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = ("--work", str(tmp_path / "rows"))
    found = run(capsys, "bench", "results", "--dry-run", "--modality", "mar", *QUICK, *work)
    assert [one["job"] for one in found] == ["baselines of zoo:mar", "CSpD"]
    assert found[1]["drafters"] == {"cspd": "zoo:mar-drafter"}
    assert (found[1]["prompts"], found[1]["measured"]) == (1, False)
    assert not (tmp_path / "rows").exists()


def test_wrong_files_and_names_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    out = ("--out", str(tmp_path / "a.md"))
    for options, why in (
        (("--out", str(tmp_path / "none" / "a.md")), "there is no folder"),
        (("--out", str(tmp_path / "a.csv")), "cannot be written"),
        ((*out, "--compare", str(other)), "is no page of results"),
        ((*out, "--keep", str(other), "--modality", "mar"), "is no page of results"),
        ((*out, "--keep", str(other)), "name those to measure again with --modality"),
        (("--only", "hivs"), "did you mean 'hivis'"),
        (("--vlm-model", "zoo:lava"), "lava"),
    ):
        assert why in fail(capsys, "bench", "results", *options)[1]


def test_an_interrupted_run_keeps_the_rows_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, store, done = select(plan(), ["mar"], None), Store(tmp_path), list[str]()

    def measure(job: Job, settings: dict[str, Any], effort: Effort, json: bool) -> Record:
        if job.name == "CSpD":
            raise KeyboardInterrupt
        done.append(job.name)
        return Record(settings, (), (), {}, {}, 1, 1, 0.0)

    monkeypatch.setattr(command, "measure", measure)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match="interrupted at CSpD; the rows before are in"):
            command.measure_all(jobs, store, Effort(), True)
    assert done == ["baselines of zoo:mar"]
    assert store.find(describe(jobs[0], Effort())) is not None


def test_a_system_without_a_recipe_is_measured_by_its_study(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def study(judge: str, small: tuple[str, ...], timed: int, **more: Any) -> Comparison:
        assert more.keys() == {"repeats", "seed", "progress"}
        rows = [Row("plain"), Row("SV", drafter=", ".join((judge, *small)))]
        made: tuple[list[Row], list[Row]] = (rows, [Row("a, alone")])
        return Comparison(judge, "vlm", *made, [], timed, more["repeats"], 240, 1, {}, 0)

    monkeypatch.setitem(sys.modules, "one_study", SimpleNamespace(measure=study))
    own = System(
        "SV", "vlm", "?", model="zoo:llava", study="one_study", small=("zoo:llava-drafter",)
    )
    job = Job("SV", read_groups()["vlm"], "zoo:llava", (), {}, own)
    found = command.measure(job, describe(job, Effort(repeats=3)), Effort(repeats=3), json=True)
    assert [row.recipe for row in (*found.rows, *found.baselines)] == ["plain", "SV", "a, alone"]
    assert found.rows[1].drafter == "zoo:llava, zoo:llava-drafter"
    assert (found.requests, found.judged) == (6, 240)  # one request of each kind
    assert found.settings["drafters"] == {"SV": "zoo:llava-drafter"}


def test_sections_that_are_not_measured_are_kept(tmp_path: Path) -> None:
    def make(sections: dict[str, str], note: str = "") -> Page:
        made = tuple(
            Section(name, name, f"zoo:{name}", about, (Line(name, "a", "zoo:m"),))
            for name, about in sections.items()
        )
        tables = tuple(CategoryTable(f"zoo:{one}", about, ()) for one, about in sections.items())
        return Page(made, f"run {len(note)}", tables, note)

    make({"vlm": "old", "mar": "old"}, "busy").write(tmp_path / "a.md", None, {})
    before = read_page(tmp_path / "a.json")
    new = make({"vlm": "new", "mar": "not measured"})
    page = keep_sections(before, new, {"vlm"})
    assert [one.about for one in page.sections] == ["new", "old"]
    tables = [(one.model, one.head) for one in page.categories]
    assert tables == [("zoo:vlm", "new"), ("zoo:mar", "old")]  # in the order of the sections
    assert (page.command, page.note) == ("run 4\nrun 0", "busy")
    again = keep_sections(replace(page, command="run 4\nrun 0\nrun 4"), new, {"vlm"})
    assert again.command == "run 4\nrun 0"
    page.write(tmp_path / "b.md", before, {})
    assert read_page(tmp_path / "b.json") == page
    older = json.loads((tmp_path / "b.json").read_text())
    older["categories"] = older["categories"][0]  # one table, as pages had before
    (tmp_path / "c.json").write_text(json.dumps(older))
    assert read_page(tmp_path / "c.json").categories == page.categories[:1]
    with pytest.raises(ValueError, match="lacks the section tts; measure it too"):
        keep_sections(before, make({"tts": "not measured"}), {"vlm"})


@pytest.mark.slow
def test_a_row_is_measured_once_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, out = ("--work", str(tmp_path / "rows")), tmp_path / "a.md"
    given = ("bench", "results", "--only", "ctc-ssd", *QUICK, *work, "--out")
    run(capsys, *given, str(out))
    first = {file.name: file.read_bytes() for file in (tmp_path / "rows").iterdir()}
    again = run(capsys, *given, str(tmp_path / "b.md"), "--compare", str(out.with_suffix(".json")))
    assert {file.name: file.read_bytes() for file in (tmp_path / "rows").iterdir()} == first
    assert (again["moved"], again["repeated"]) == (0, 1)
    sections = json.loads(out.with_suffix(".json").read_text())["sections"]
    lines = {one["name"]: one for section in sections for one in section["lines"]}
    assert lines["CTC-SSD"]["speed"] > 0
    assert lines["CTC-SSD"]["quality"] == "word error rate"
    assert lines["SMUD"]["note"] == "not measured yet"
    assert (tmp_path / "a-recognition.svg").exists()
