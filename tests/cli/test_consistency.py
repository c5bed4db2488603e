"""`mmspec train cllm` writes a new target that recipe cllm decodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspec.cli import main
from tests.toys.folders import text_pair

pytestmark = pytest.mark.exhaustive


def test_a_new_target_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text_pair(tmp_path)
    out = tmp_path / "new"
    asked = ["train", "cllm", "--model", str(tmp_path / "text"), "--prompt", "w5 w9 w7"]
    sizes = ["--prompts", "1", "--steps", "2", "--max-new-tokens", "6", "--block", "3"]
    assert main([*asked, *sizes, "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trajectories"] > 0
    told = ["generate", "--model", str(out), "--recipe", "cllm", "--prompt", "w5 w9 w7", "--json"]
    assert main([*told, "--max-new-tokens", "6"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["exact"]
    assert main([*asked, *sizes, "--out", str(out)]) == 1
    assert "exists and is not empty" in capsys.readouterr().err
