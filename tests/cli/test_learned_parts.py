"""`mmspec train stop`, `tree` and `judge`: files that recipes load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspec.cli import main
from mmspec.drafters.lengths.learned import StopHead
from mmspec.verifiers.judge import JudgeHead
from tests.toys.folders import text_pair

pytestmark = pytest.mark.exhaustive


def test_all_are_trained_saved_and_given_on_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text_pair(tmp_path)
    pair = ["--model", str(tmp_path / "text"), "--drafter", str(tmp_path / "text-drafter")]
    prompts = ["--prompt", "w5 w9 w7", "--prompt", "w20 w31 w8 w9", "--prompts", "2", "--json"]
    short = ["--max-new-tokens", "8", "--steps", "5"]
    out = tmp_path / "stop.safetensors"
    asked = ["train", "stop", *pair, *prompts, *short, "--out", str(out)]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 0
    assert isinstance(StopHead.load(out), StopHead)
    told = ["generate", *pair, "--prompt", "w5 w9 w7", "--max-new-tokens", "8", "--json"]
    assert main([*told, "--recipe", "coupled", "--length", f"disco:head={out}"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["exact"]
    out = tmp_path / "tree.safetensors"
    assert main(["train", "tree", *pair, *prompts, *short, "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"] > 0
    assert main([*told, "--recipe", "coupled", "--tree", f"c2t:head={out},threshold=0"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["num_draft_tokens"] > 0
    out = tmp_path / "judge.safetensors"
    asked = ["train", "judge", *pair, *prompts, *short, "--tail", "2", "--out", str(out)]
    code = main(asked)
    said = capsys.readouterr()
    if code == 0:  # random models may refuse nothing harmless
        assert json.loads(said.out)["tokens"] > 0
        assert JudgeHead.load(out).size > 0
    else:
        assert "refused tokens are harm" in said.err


def test_a_table_of_next_tokens_is_saved_and_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text_pair(tmp_path)
    out, model = tmp_path / "table.safetensors", ["--model", str(tmp_path / "text")]
    assert main(["train", "ngrams", *model, "--width", "4", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["width"] == 4
    asked = ["generate", *model, "--prompt", "w5 w9 w7", "--max-new-tokens", "12", "--json"]
    assert main([*asked, "--recipe", "ngrammys", "--set", f"table={out}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stats"]["num_draft_tokens"] > 0
    assert main([*asked, "--recipe", "plain"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == found["text"]


def test_what_has_no_draft_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text_pair(tmp_path)
    asked = ["train", "stop", "--model", str(tmp_path / "text"), "--recipe", "prompt-lookup"]
    assert main([*asked, "--prompt", "w5 w9", "--out", str(tmp_path / "x.safetensors")]) == 1
    assert "give --recipe speculative-sampling" in capsys.readouterr().err
