"""`mmspec train datastore`: a file that recipe rest drafts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspec.drafters.lookup.datastore import Datastore
from tests.cli.running import fail, run
from tests.toys.folders import text_pair

pytestmark = pytest.mark.exhaustive


def test_outputs_and_answers_are_kept_and_drafted_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text_pair(tmp_path)
    model, own, other = ["--model", str(tmp_path / "text")], tmp_path / "a.npz", tmp_path / "b.npz"
    prompt = ["--prompt", "w5 w9 w7", "--max-new-tokens", "12"]
    made = run(capsys, "train", "datastore", *model, *prompt, "--out", str(own))
    assert (made["texts"], made["tokens"]) == (1, 12)
    plain = run(capsys, "generate", *model, *prompt, "--recipe", "plain")
    assert Datastore.load(own).tokens[:-1].tolist() == plain["tokens"]
    asked = ["generate", *model, *prompt, "--recipe", "rest", "--set"]
    found = run(capsys, *asked, f"datastore={own}")
    assert found["text"] == plain["text"]
    assert found["stats"]["num_accepted_draft_tokens"] >= 8  # its own output, repeated
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "w5", "answer": plain["text"]}) + "\n")
    made = run(capsys, "train", "datastore", *model, "--data", str(data), "--out", str(other))
    assert made["texts"] == 1
    again = run(capsys, *asked, f"datastore={other}")
    assert again["text"] == plain["text"]
    assert again["stats"]["num_accepted_draft_tokens"] >= 8


def test_what_keeps_nothing_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text_pair(tmp_path)
    data, out = tmp_path / "data.jsonl", str(tmp_path / "a.npz")
    data.write_text('{"prompt": "w5"}\n')
    asked = ("train", "datastore", "--model", str(tmp_path / "text"))
    for more, message in (
        (("--data", str(data), "--out", out), "data.jsonl:1 has no answer to keep; give data with"),
        (("--data", str(data), "--prompt", "w5", "--out", out), "two sources of texts; drop one"),
        (("--data", str(data), "--prompts", "3", "--out", out), "--prompts=3 counts examples, and"),
        (("--prompt", "w5", "--out", str(tmp_path / "a.txt")), ".txt cannot be written"),
    ):
        _, line = fail(capsys, *asked, *more)
        assert message in line
    _, line = fail(capsys, "train", "datastore", "--model", "zoo:mar", "--out", out)
    assert "recipe 'rest' decodes tokens, but zoo:mar gives patches" in line
