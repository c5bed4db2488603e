"""Files of traces: what is cut is read up to the cut, what is damaged is refused by its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmspec.tracing.jsonl import read_jsonl, write_jsonl
from tests.tracing.records import make_header, make_rounds


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    write_jsonl(path, make_header(6), make_rounds(6))
    return path


def test_a_file_gives_back_what_was_written(file: Path) -> None:
    header, rounds = read_jsonl(file)
    assert header == make_header(6)
    assert rounds == make_rounds(6)
    assert len(file.read_text().splitlines()) == 7


def test_a_cut_file_is_read_up_to_the_cut(file: Path) -> None:
    text = file.read_text()
    file.write_text(text[: int(len(text) * 0.7)])
    header, rounds = read_jsonl(file)
    assert 0 < len(rounds) < 6
    assert rounds == make_rounds(6)[: len(rounds)]
    assert header["notes"] == [f"The file was cut: it holds {len(rounds)} of 6 rounds."]


@pytest.mark.parametrize("left", [0, 20])
def test_a_file_cut_within_its_header_is_no_trace(file: Path, left: int) -> None:
    file.write_text(file.read_text()[:left])
    with pytest.raises(ValueError, match="is not a trace: its first line"):
        read_jsonl(file)


def test_no_rounds_are_a_trace(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "run.jsonl", make_header(0, 0), [])
    assert read_jsonl(tmp_path / "run.jsonl") == (make_header(0, 0), [])


def test_another_version_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "run.jsonl", make_header(0, version=7, mmspec="9.9"), [])
    with pytest.raises(ValueError, match=r"version 7.*reads version 1.*\(9\.9\)"):
        read_jsonl(tmp_path / "run.jsonl")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe\n")
    (tmp_path / "list").write_text("[1, 2]\n")
    for name, why in (("picture", "not a text file"), ("list", "not a trace")):
        with pytest.raises(ValueError, match=why):
            read_jsonl(tmp_path / name)


def drop_rows(round_: dict[str, Any]) -> None:
    round_["rows"] = []


def drop_draft(round_: dict[str, Any]) -> None:
    del round_["rows"][0]["draft"]


def add_circle(round_: dict[str, Any]) -> None:
    round_["rows"][0]["parents"][0] = 5


def leave_the_tree(round_: dict[str, Any]) -> None:
    round_["rows"][0]["path"] = [99]


def shorten_p(round_: dict[str, Any]) -> None:
    round_["rows"][0]["p"].pop()


def shorten_text(round_: dict[str, Any]) -> None:
    round_["rows"][0]["text"].pop()


DAMAGES = [
    (drop_rows, "has 0 rows and the header names a batch of 1"),
    (drop_draft, "has no draft of type list"),
    (add_circle, "has parents or a path that are no tree"),
    (leave_the_tree, "has parents or a path that are no tree"),
    (shorten_p, "has p for another number"),
    (shorten_text, "has text for another number"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGES)
def test_a_damaged_round_is_refused_by_its_line(
    file: Path, damage: Callable[[dict[str, Any]], None], why: str
) -> None:
    lines = file.read_text().splitlines()
    round_ = json.loads(lines[3])
    damage(round_)
    file.write_text("\n".join([*lines[:3], json.dumps(round_), *lines[4:]]))
    with pytest.raises(ValueError, match=f"line 4 {why}"):
        read_jsonl(file)


def test_a_damaged_line_is_refused(file: Path) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], lines[3][:-9], *lines[4:]]))
    with pytest.raises(ValueError, match="line 4 is damaged"):
        read_jsonl(file)
