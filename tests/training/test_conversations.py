"""Files of questions: bad rows are counted and named, texts stay as they are."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mmspec.training import data_files
from mmspec.training.conversations import DataSet, digest, read_data_set, read_questions
from mmspec.training.media import MediaFolders

CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
ROWS: list[dict[str, Any]] = [
    {"prompt": "What?", "image": "a.png", "answer": "x"},
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "A"},
        ],
        "images": ["a.png"],
    },
    {
        "conversations": [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}],
        "image": "a.png",
        "system": "s",
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}},
                    {"type": "text", "text": "t"},
                ],
            }
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "w"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "22"},
            {"role": "assistant", "content": "d"},
        ],
        "tools": [{"type": "function", "function": {"name": "find"}}],
    },
    {
        "conversations": [
            {"from": "human", "value": "<video>\nq"},
            {"from": "function_call", "value": '{"name": "find", "arguments": {}}'},
            {"from": "observation", "value": "o"},
        ],
        "video": "c.mp4",
        "tools": '[{"name": "find"}]',
    },
]
VALUES: list[Any] = [None, True, -1, float("nan"), "", "<image>", "\ud800", "a\0b", "../a.png"]
VALUES += ["http://x/y", "data:,", "data:image/png;base64,%", "file:///etc/passwd", "a" * 5000]
VALUES += [[], {}, [None], {"url": None}, {"type": "image"}, ["a.png"], "tool", "["]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "c.mp4").write_bytes(b"x")
    return tmp_path


def read(folder: Path, *rows: Any, name: str = "rows.jsonl", **options: Any) -> DataSet:
    text = json.dumps(rows, indent=1)
    if name.endswith("l"):
        text = "\n".join(map(json.dumps, rows))
    (folder / name).write_text(text)
    return read_data_set(folder / name, MediaFolders(folder, **options))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[" * 100_000, r"a\.jsonl:2 is not JSON \(nested too deeply\)"),
        (b"{", r"a\.jsonl:2 is not JSON"),
        (b"5", r"a\.jsonl:2 is a int, not an object"),
        (b"\0" * (1 << 18), r"a\.jsonl:2 has more than 0 MiB; give one conversation"),
    ],
    ids=["deep", "cut", "number", "endless"],
)
def test_an_invalid_line_is_named(
    tmp_path: Path, line: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "MAX_LINE_BYTES", 200_000)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "what is it?"}\n' + line + b'\n{"prompt": "and?"}\n')
    with pytest.raises(ValueError, match=f"{message}.*1 of 3 rows .*--max-bad-rows 1"):
        read_questions(file)
    found = read_data_set(file, MediaFolders(tmp_path))
    found.check(1)
    assert [one.place for one in found.questions] == [f"{file}:1", f"{file}:3"]
    assert digest(file, found.bad) != digest(file)  # answers are numbered by what is left


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="give --data a"):
        read_questions(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl is a pipe or a device"):
        read_questions(tmp_path)


def test_all_forms_are_read(folder: Path) -> None:
    found = read(folder, *ROWS)
    assert not found.bad
    by_row = {one.row: one for one in found.questions}
    assert [len(by_row[row].images) for row in range(6)] == [1, 1, 1, 1, 0, 0]
    assert by_row[3].images[0].data == b"hello"
    assert [one.answer for one in found.questions] == ["x", "A", "a", None, None, "d", None, None]
    tool = by_row[4]
    assert [turn.role for turn in tool.turns] == ["user", "assistant", "tool"]
    (call,) = tool.turns[1].fields["tool_calls"]
    assert call["function"] == {"name": "find", "arguments": {"a": 1}}  # as templates read it
    assert tool.tools[0]["function"]["name"] == "find"
    assert by_row[5].videos[0].files == (folder / "c.mp4",)
    assert by_row[2].turns[0].text == "s"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "none of its messages"),
        ({"messages": [], "conversations": []}, "has messages and conversations"),
        ({"prompt": "a", "image": "a.png", "images": ["a.png"]}, "has images and image"),
        ({"prompt": "a", "system": 5}, "has a system that is not text"),
        ({"prompt": "a", "tools": "{"}, "not JSON"),
        ({"prompt": "a", "tools": [5]}, "not a list of schemas"),
        ({"prompt": "a \ud800"}, "not Unicode"),
        ({"prompt": "a", "image": "x\nb.png"}, r"the image x\\nb.png, but there is no file"),
        ({"prompt": "a", "image": "http://h/a.png"}, "on the network; give --allow-urls"),
        ({"prompt": "a", "image": "data:image/png,a"}, "has the data URL data:image/png"),
        ({"prompt": "a", "image": "data:image/png;base64,%"}, "a data URL that is not base64"),
        ({"prompt": "<video>", "video": "data:video/mp4;base64,aGk="}, "within the data"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(folder: Path, row: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(folder, {"prompt": "good"}, row).check(0)


def test_a_tag_is_a_mark_only_beside_a_video(folder: Path) -> None:
    (one,) = read(folder, {"prompt": "what does <video> mean in HTML?"}).questions
    assert (one.turns[0].text, one.videos) == ("what does <video> mean in HTML?", ())


def test_malformed_rows_are_bad_rows_and_texts_stay(folder: Path) -> None:
    """Rows with parts removed and replaced: each is good or bad, in both kinds of file."""
    generator = random.Random(0)
    rows = [_damage(generator.choice(ROWS), generator) for _ in range(400)]
    for name in ("rows.jsonl", "rows.json"):
        found = read(folder, *rows, name=name)
        good = {one.row for one in found.questions}
        assert (found.rows, len(good) + len(found.bad)) == (400, 400)
        assert 50 < len(good) < 350
        assert all(str(one).isprintable() for one in found.bad)
        for one in found.questions:
            text = json.dumps(rows[one.row], ensure_ascii=False)
            parts = [part for turn in one.turns for part in turn.parts if isinstance(part, str)]
            assert all(json.dumps(part, ensure_ascii=False)[1:-1] in text for part in parts)


def _damage(row: Any, generator: random.Random) -> Any:
    """A copy with up to three parts removed or replaced."""
    row = copy.deepcopy(row)
    for _ in range(generator.randint(1, 3)):
        *path, last = generator.choice([one for one in _paths(row) if one] or [("prompt",)])
        holder = row
        for key in path:
            holder = holder[key]
        if generator.random() < 0.3 and (isinstance(holder, list) or last in holder):
            del holder[last]
        else:
            holder[last] = copy.deepcopy(generator.choice(VALUES))
    return row


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys: Any = value if isinstance(value, dict) else ()
    keys = range(len(value)) if isinstance(value, list) else keys
    return [prefix, *(path for key in keys for path in _paths(value[key], (*prefix, key)))]
