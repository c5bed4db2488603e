"""Targets under the weight names of an engine: the same model, read back by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmspec import zoo
from mmspec.formats.targets import export_target
from mmspec.models.folder import read_shapes
from tests.cli.running import fail, run

TOWER = "vision_tower.vision_model."


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder)


def assert_is_same_model(folder: Path, model: Any) -> None:
    theirs, own = load(folder).state_dict(), model.state_dict()
    assert theirs.keys() == own.keys()
    assert all(torch.equal(one, own[name]) for name, one in theirs.items())


def test_llava_has_the_names_that_vllm_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    found = run(capsys, "export", "target", "zoo:llava", "--to", str(out), "--format", "vllm")
    own, written = read_shapes(zoo.path("llava")), read_shapes(out)
    towers = [name for name in own if name.startswith("vision_tower.")]
    assert found["weights"] == len(written) == len(own)
    assert found["renamed"] == len(towers) == sum(name.startswith(TOWER) for name in written)
    assert not [name for name in written if name.startswith(f"{TOWER}vision_model")]
    assert any(name.startswith("language_model.model.layers.") for name in written)
    assert_is_same_model(out, load(zoo.path("llava")))
    chat = [{"role": "user", "content": "what is this?"}]
    theirs, ours = AutoProcessor.from_pretrained(out), zoo.processor("llava")
    assert theirs.apply_chat_template(chat) == ours.apply_chat_template(chat)
    assert {file.suffix for file in out.iterdir()} == {".json", ".jinja", ".safetensors"}
    assert (
        "holds something already"
        in fail(capsys, "export", "target", "zoo:llava", "--to", str(out))[1]
    )


def test_names_that_vllm_reads_already_stay(tmp_path: Path) -> None:
    """Of a family without changes, and of a folder that was written for the engine before."""
    renamed = export_target("vllm", zoo.path("qwen2.5-vl"), tmp_path / "qwen")
    assert all(old == new for old, new in renamed.items())
    assert_is_same_model(tmp_path / "qwen", load(zoo.path("qwen2.5-vl")))
    export_target("vllm", zoo.path("llava"), tmp_path / "once")
    renamed = export_target("vllm", tmp_path / "once", tmp_path / "twice")
    assert all(old == new for old, new in renamed.items())


@pytest.mark.parametrize("prefix", ["model.vision_tower.", "model.vision_tower.vision_model."])
def test_names_of_other_versions_of_transformers(prefix: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(zoo.path("llava"), source)
    weights = load_file(source / "model.safetensors")
    older = {name.replace("vision_tower.", prefix, 1): one for name, one in weights.items()}
    save_file(older, source / "model.safetensors", {"format": "pt"})
    export_target("vllm", source, tmp_path / "out")
    own = read_shapes(zoo.path("llava"))
    expected = {name.replace("vision_tower.", TOWER, 1) for name in own}
    assert read_shapes(tmp_path / "out").keys() == expected


def test_shards_are_renamed_one_by_one(tmp_path: Path) -> None:
    model = load(zoo.path("llava"))
    model.save_pretrained(tmp_path / "source", max_shard_size="1MB")
    export_target("vllm", tmp_path / "source", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 1
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as stored:
            names = set(stored.keys())
        assert names == {name for name, where in index["weight_map"].items() if where == file}
    assert_is_same_model(tmp_path / "out", model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "paligemma"}, r"paligemma with clip_vision_model in vllm are not known"),
        ({"vision_config": {"model_type": "pixtral"}}, r"llava with pixtral in vllm are not known"),
        ({"text_config": {"model_type": "gemma"}}, r"llava with a text model gemma is not known"),
        ({"architectures": None}, r"config\.json lists no architectures"),
    ],
)
def test_what_is_not_known_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    shutil.copytree(zoo.path("llava"), tmp_path / "source")
    change_config(tmp_path / "source", **changes)
    with pytest.raises(ValueError, match=message):
        export_target("vllm", tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_arguments_are_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = ("--to", str(tmp_path / "out"))
    for source, layout, message in (
        ("zoo:llava", "sglang", "format sglang holds heads only; choose --format vllm"),
        ("zoo:llava", "vlm", "did you mean 'vllm'?"),
        ("zoo:whisper", "vllm", "the weight names of whisper in vllm are not known"),
        (str(tmp_path / "none"), "vllm", "there is no model folder"),
        (
            "somebody/never-downloaded",
            "vllm",
            "there is no local copy of somebody/never-downloaded",
        ),
    ):
        assert message in fail(capsys, "export", "target", source, *to, "--format", layout)[1]
    shutil.copytree(zoo.path("llava"), tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "copy it again" in fail(capsys, "export", "target", str(tmp_path / "cut"), *to)[1]
    assert not (tmp_path / "out").exists()
