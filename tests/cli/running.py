"""Run a command in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmspec.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """A command's JSON document; it must succeed and print nothing else."""
    capsys.readouterr()
    code = main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """A command's exit code and its one line on stderr."""
    capsys.readouterr()
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert code != 0
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return code, lines[0]
