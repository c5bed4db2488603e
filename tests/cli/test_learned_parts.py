"""`mmspec train stop` and `mmspec train judge`: files that recipes load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspec.cli import main
from mmspec.drafters.lengths.learned import StopHead
from mmspec.verifiers.judge import JudgeHead
from tests.toys.folders import text_pair

pytestmark = pytest.mark.exhaustive


def test_both_are_trained_saved_and_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text_pair(tmp_path)
    pair = ["--model", str(tmp_path / "text"), "--drafter", str(tmp_path / "text-drafter")]
    prompts = ["--prompt", "w5 w9 w7", "--prompt", "w20 w31 w8 w9", "--prompts", "2", "--json"]
    out = tmp_path / "stop.safetensors"
    asked = ["train", "stop", *pair, *prompts, "--steps", "5", "--out", str(out)]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 0
    assert isinstance(StopHead.load(out), StopHead)
    out = tmp_path / "judge.safetensors"
    asked = ["train", "judge", *pair, *prompts, "--max-new-tokens", "8", "--tail", "2"]
    code = main([*asked, "--steps", "5", "--out", str(out)])
    said = capsys.readouterr()
    if code == 0:  # random models may refuse nothing harmless
        assert json.loads(said.out)["tokens"] > 0
        assert JudgeHead.load(out).size > 0
    else:
        assert "refused tokens are harm" in said.err


def test_what_has_no_draft_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text_pair(tmp_path)
    asked = ["train", "stop", "--model", str(tmp_path / "text"), "--recipe", "prompt-lookup"]
    assert main([*asked, "--prompt", "w5 w9", "--out", str(tmp_path / "x.safetensors")]) == 1
    assert "give --recipe speculative-sampling" in capsys.readouterr().err
