"""Files of questions: damaged and endless lines are named, and nothing is waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmspec.training import conversations
from mmspec.training.conversations import read_questions


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[" * 100_000, r"a\.jsonl:2 is not JSON \(nested too deeply\)"),
        (b"{", r"a\.jsonl:2 is not JSON"),
        (b"5", r"a\.jsonl:2 is a int, not an object"),
        (b"\0" * (1 << 18), r"a\.jsonl:2 has more than 0 MiB; give one question"),
    ],
    ids=["deep", "cut", "number", "endless"],
)
def test_an_invalid_line_is_named(
    tmp_path: Path, line: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_LINE_BYTES", 200_000)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "what is it?"}\n' + line)
    with pytest.raises(ValueError, match=message):
        read_questions(file)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="give --data a"):
        read_questions(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl is a pipe or a device"):
        read_questions(tmp_path)
