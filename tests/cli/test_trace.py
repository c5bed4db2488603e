"""Traces and coloured words on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import mmspec
from mmspec.cli import main
from tests.cli.running import fail, run

GENERATE = ("generate", "--image", "zoo:scene", "--prompt", "describe the picture")


@pytest.mark.parametrize(
    "options",
    [("--no-compare",), pytest.param(("--repeats", "1"), marks=pytest.mark.exhaustive)],
)
def test_generate_writes_a_trace_and_trace_makes_its_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    file = tmp_path / "run.jsonl"
    made = run(capsys, *GENERATE, *options, "--trace", str(file))
    assert made["trace"] == str(file)
    trace = mmspec.Trace.load(file)
    assert trace.list_tokens() == [made["tokens"]]
    assert ("--no-compare" in options) == (trace.header["plain"] is None)
    assert not trace.header["plain"] or trace.header["plain"]["is_same"]
    assert trace.header["prompt"] == ["describe the picture"]
    page = run(capsys, "trace", str(file))
    assert page["rounds"] == len(trace.rounds)
    assert "<title>Trace of llava with coupled</title>" in Path(page["out"]).read_text()


def test_bad_files_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, line = fail(capsys, *GENERATE, "--trace", str(tmp_path / "run.txt"))
    assert "choose one of .html, .jsonl" in line
    _, line = fail(capsys, "trace", str(tmp_path / "missing.jsonl"))
    assert "missing.jsonl" in line
    (tmp_path / "other.jsonl").write_text("{}\n")
    _, line = fail(capsys, "trace", str(tmp_path / "other.jsonl"))
    assert "is not a trace" in line
    (tmp_path / "run.html").write_text("<html>")
    _, line = fail(capsys, "trace", str(tmp_path / "run.html"))
    assert "is a page; give the trace that" in line
    _, line = fail(capsys, "trace", str(tmp_path / "other.jsonl"), "--out", str(tmp_path / "a.png"))
    assert ".html" in line


def test_accepted_words_are_coloured_in_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(*options: str) -> str:
        capsys.readouterr()
        assert main([*GENERATE, "--no-compare", *options]) == 0
        return capsys.readouterr().out

    plain = show()
    assert "\x1b[" not in plain
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich then writes as to a terminal
    coloured, quiet = show(), show("--quiet")
    words = plain.splitlines()[0]
    assert quiet.splitlines()[0] == words
    first = coloured.splitlines()[0]
    assert "\x1b[4;32m" in first
    assert strip_colours(first) == words
    assert "accepted drafts" in coloured


def strip_colours(line: str) -> str:
    parts = line.split("\x1b[")
    return parts[0] + "".join(part.partition("m")[2] for part in parts[1:])
