"""Files that parts name are copied into a saved folder, wherever they lay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.drafters.lengths.learned import SpecDecPP, StopHead
from mmspec.saving import FILES, split_files
from mmspec.verifiers.judge import JudgeHead
from tests import toys
from tests.partners import noisy


def accelerated(recipe: str, **parts: Any) -> mmspec.Accelerated:
    return mmspec.accelerate(toys.model("llama"), recipe, drafter=noisy("llama"), **parts)


@pytest.mark.exhaustive
def test_relative_files_are_copied_and_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder changes, the files go, and the saved folder moves."""
    model = toys.model("llama")
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    JudgeHead(model.config.hidden_size, threshold=0.25).save("judge.safetensors")
    StopHead().save("stop.safetensors")
    fast = accelerated(
        "judge", judge="judge.safetensors", length="specdec-pp:threshold=0.9,head=stop.safetensors"
    )
    monkeypatch.chdir(tmp_path)
    fast.save_pretrained("saved")
    mmspec.load("saved", model).save_pretrained("saved")  # over itself
    shutil.rmtree(there)
    shutil.move("saved", "moved")
    again = mmspec.load("moved", model)
    length: Any = again.recipe.execution.length
    assert isinstance(length, SpecDecPP)
    assert length.threshold == 0.9
    assert again.session.bound.verifier.head.threshold == 0.25
    names = sorted(file.name for file in (tmp_path / "moved" / FILES).iterdir())
    assert names == ["judge.safetensors", "length.head.safetensors"]
    request = toys.inputs("llama")
    outs = [one.generate(**request, max_new_tokens=6).sequences for one in (fast, again)]
    assert torch.equal(*outs)


def test_a_file_that_is_gone_and_an_object_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "stop.safetensors"
    StopHead().save(file)
    fast = accelerated("coupled", length=f"disco:head={file}")
    file.unlink()
    with pytest.raises(ValueError, match=r"length.head was read from .*no longer there"):
        fast.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "mmspec.json").exists()
    made = accelerated("coupled", length=SpecDecPP(StopHead()))
    with pytest.raises(ValueError, match=r"length was given as an object .* a file, as in"):
        made.save_pretrained(tmp_path / "saved")


def test_a_file_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    StopHead().save(tmp_path / "stop.safetensors")
    accelerated("coupled", length=f"disco:head={tmp_path / 'stop.safetensors'}").save_pretrained(
        tmp_path / "saved"
    )
    file = tmp_path / "saved" / "mmspec.json"
    content = json.loads(file.read_text())
    content["files"]["length.head"] = "../../stop.safetensors"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="which is not one of the folder 'files' beside it"):
        mmspec.load(tmp_path / "saved", toys.model("llama"))


def test_what_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and numbers are none, even beside a file of that name; a model's folder is named."""
    monkeypatch.chdir(tmp_path)
    for name in ("512", "auto", "random_walk", "map.json"):
        Path(name).write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    options = {"map": None, "motion": "constant_velocity", "tokenizer": None}
    given = {"length": "auto", "kv": "sparse:tokens=512", "motion": "random_walk", "tree": [3, 2]}
    assert split_files(given, options) == (given, {})
    parts, files = split_files({"map": "map.json", "tokenizer": "model"}, options)
    assert parts == {"tokenizer": str(tmp_path / "model")}
    assert files == {"map": tmp_path / "map.json"}
