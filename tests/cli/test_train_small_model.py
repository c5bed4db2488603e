"""`mmspec train massv`: a small language model learns to see through its target's eyes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mmspec
from mmspec.cli import main
from mmspec.zoo.scene import sample
from mmspec.zoo.scene_tensors import render_pixels
from tests.cli.running import fail, run
from tests.cli.test_train_recipe import stopped
from tools.zoo.vlm.architecture import BLIND, SIGHTED
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.train import save


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaVA, a text model of its tokens, and pictures with a question each."""
    from PIL import Image

    found = tmp_path_factory.mktemp("massv")
    torch.manual_seed(0)
    family = FAMILIES["llava"]
    processor = family.build_processor()
    save(family.build(SIGHTED, processor.tokenizer), processor, found / "vlm", sees=True)
    small = family.build(BLIND, processor.tokenizer)
    save(small, processor, found / "text", sees=False)
    rows = []
    for number in range(6):
        Image.fromarray(render_pixels(sample(number))).save(found / f"{number}.png")
        rows.append({"prompt": "is it red?", "image": f"{number}.png", "answer": "a red circle."})
    rows.append({"prompt": "a text", "answer": "what is it?"})
    (found / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def _train_command(root: Path, out: Path, *more: str, recipe: str = "massv") -> list[str]:
    given = ["train", recipe, "--target", str(root / "vlm"), "--data", str(root / "data.jsonl")]
    given += ["--drafter", str(root / "text"), "--out", str(out), "--batch", "2", "--every", "2"]
    return [*given, "--max-new-tokens", "8", "--held-out", "2", "--steps", "5", *more]


@pytest.mark.exhaustive
def test_a_small_model_learns_in_two_stages_and_goes_on_where_it_was_killed(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed in either stage; the folder drafts, sees the picture, and changes no answer."""
    how = ("--rate", "0.003", "--answers", "data", "--ema", "0.5")
    found = run(capsys, *_train_command(root, tmp_path / "whole", *how))
    assert found["history"][-1]["loss"] < found["history"][1]["loss"]
    for at in (1, 3):
        with stopped(at, KeyboardInterrupt()):
            assert main(_train_command(root, tmp_path / "cut", *how)) == 130
        capsys.readouterr()
    again = run(capsys, *_train_command(root, tmp_path / "cut", *how))
    assert again["history"] == found["history"]
    for name in ("model.safetensors", "projector.safetensors"):
        ours, theirs = (load_file(tmp_path / one / name) for one in ("whole", "cut"))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours | theirs)
    asked = ["generate", "--model", str(root / "vlm"), "--image", str(root / "0.png")]
    asked += ["--prompt", "is it red?", "--recipe"]
    drafted = run(capsys, *asked, "massv", "--drafter", str(tmp_path / "cut"))
    plain = run(capsys, *asked, "plain")
    assert drafted["text"] == plain["text"]


def test_a_model_that_sees_nothing_learns_by_the_same_command(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No projector is written."""
    out = tmp_path / "drafter"
    run(capsys, *_train_command(root, out, "--answers", "data", "--steps", "2", recipe="spd-mllm"))
    assert not [*out.glob("projector*")]
    fast = mmspec.accelerate(str(root / "vlm"), "spd-mllm", drafter=str(out))
    assert fast.sees == "nothing"


def test_what_cannot_be_taught_is_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(*more: str) -> str:
        return fail(capsys, *_train_command(root, tmp_path / "out", *more))[1]

    assert "is of a new model; drop it, or --drafter" in error_of("--set", "hidden_size=8")
    assert "has a vision encoder of its own" in error_of("--drafter", str(root / "vlm"))
    assert "nowhere" in error_of("--drafter", str(root / "nowhere"))
    assert not (tmp_path / "out").exists()
    assert "with AdamW only; drop --muon" in error_of("--muon")
    found = run(capsys, *_train_command(root, tmp_path / "out", "--dry-run"))
    own = sum(one.numel() for one in load_file(root / "text" / "model.safetensors").values())
    projector = 64 * 128 + 128 + 128 * 128 + 128  # tower 64 wide, small model 128
    assert found["head parameters"] == own + projector
