"""Model folders: shapes from headers are those of the tensors; damaged folders are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmspec.models.folder import check_folder_exists, find_weight_files, read_json, read_shapes

WEIGHTS = {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(())}


def index(folder: Path, **files: str) -> None:
    content = json.dumps({"weight_map": files})
    (folder / "model.safetensors.index.json").write_text(content)


def test_shapes_are_read_without_tensors(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_shapes(tmp_path) == {name: tuple(one.shape) for name, one in WEIGHTS.items()}


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    for name, value in WEIGHTS.items():
        save_file({name: value}, tmp_path / f"{name}.safetensors")
    index(tmp_path, a="a.safetensors", b="b.safetensors")
    assert set(read_shapes(tmp_path)) == {"a", "b"}
    save_file(WEIGHTS, tmp_path / "model.safetensors")  # a whole file wins
    assert find_weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_an_index_that_was_cut_is_refused(tmp_path: Path) -> None:
    """It is valid, but lists some of a series of files; files of other series may be there."""
    for number, name in enumerate("ab", 1):
        save_file({name: WEIGHTS[name]}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    save_file(WEIGHTS, tmp_path / "other-00001-of-00003.safetensors")
    index(tmp_path, a="model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"lists 1 of 2 files of weights \(not model-00002"):
        find_weight_files(tmp_path)
    index(tmp_path, a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors")
    assert len(find_weight_files(tmp_path)) == 2


@pytest.mark.parametrize("name", ["../other.safetensors", "missing.safetensors"])
def test_an_index_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    save_file(WEIGHTS, tmp_path / "part.safetensors")
    index(tmp_path, a=name)
    with pytest.raises(ValueError, match=r"points out of its folder|which is missing"):
        read_shapes(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 20, -1])
def test_truncated_weights_are_refused(tmp_path: Path, length: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS, file)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match="copy it again"):
        read_shapes(tmp_path)


def test_a_shape_has_its_bytes(tmp_path: Path) -> None:
    kinds = (torch.bool, torch.int8, torch.float8_e4m3fn, torch.float16, torch.complex64)
    save_file({str(kind): torch.zeros(3).to(kind) for kind in kinds}, tmp_path / "a.safetensors")
    assert set(read_shapes(tmp_path).values()) == {(3,)}
    header = json.dumps({"a": {"dtype": "F32", "shape": [10**18], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=r"a of shape \[1000000000000000000\] has 8 bytes"):
        read_shapes(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weights"):
        read_shapes(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="unpickling runs code"):
        read_shapes(tmp_path)


def test_json_is_an_object(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("[1]", "{", "x"):
        file.write_text(text)
        with pytest.raises(ValueError, match="is damaged"):
            read_json(file)
    file.write_text('{"a": 1}')
    assert read_json(file) == {"a": 1}


def test_nesting_and_size_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(file)
    monkeypatch.setattr("mmspec.models.folder.MAX_TEXT_BYTES", 1 << 10)
    with pytest.raises(ValueError, match="has more than"):
        read_json(file)


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_other_texts_are_looked_at(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(json.dumps({"a": "b" * 2000}))
    check_folder_exists(str(tmp_path))
    monkeypatch.setattr("mmspec.models.folder.MAX_TEXT_BYTES", 1 << 10)
    with pytest.raises(ValueError, match=f"{name} has more than"):
        check_folder_exists(str(tmp_path))


def test_damaged_settings_of_generation_are_not_ignored(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is damaged"):
        check_folder_exists(str(tmp_path))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    for read in (check_folder_exists, lambda name: read_json(Path(name) / "config.json")):
        with pytest.raises(ValueError, match=r"config\.json is a folder, not a file"):
            read(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pipes_are_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for read in (lambda: check_folder_exists(str(tmp_path)), lambda: read_json(tmp_path / name)):
        with pytest.raises(ValueError, match=f"{name} is a pipe or a device"):
            read()


@pytest.mark.parametrize(
    "content",
    [
        {"num_hidden_layers": 10**9},
        {"text_config": {"n_layer": 1e9}},
        {"depths": [2, 2, 10**9]},
        {"backbones": [{"num_local_experts": 10**6}]},
    ],
    ids=str,
)
def test_more_modules_than_any_model_has_are_refused(
    tmp_path: Path, content: dict[str, object]
) -> None:
    part = tmp_path / "unet"
    part.mkdir()
    (part / "config.json").write_text(json.dumps(content))
    check_folder_exists(str(tmp_path))  # none of its files
    (tmp_path / "model_index.json").write_text("{}")
    for folder in (tmp_path, part):
        with pytest.raises(ValueError, match=r"unet/config.json requires \w+=1.*and at most"):
            check_folder_exists(str(folder))


def test_large_sizes_are_no_counts(tmp_path: Path) -> None:
    content = {"num_hidden_layers": 126, "block_size": 8192, "vocab_size": 10**6, "rope_theta": 1e9}
    (tmp_path / "config.json").write_text(json.dumps(content))
    check_folder_exists(str(tmp_path))


def test_names_of_the_hub_are_no_missing_folders(tmp_path: Path) -> None:
    check_folder_exists("owner/name")
    check_folder_exists(str(tmp_path))
    for name in ("", "name", "./owner/name", f"{tmp_path}/name"):
        with pytest.raises(ValueError, match="there is no model folder"):
            check_folder_exists(name)
