"""Published LlamaGen files, at a reduced size: what they hold is what loads and draws."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mmspec
from mmspec import formats
from mmspec.cli import main
from mmspec.models.llamagen_weights import to_public
from tests.covering import covering
from tests.toys import image_models

KINDS = ("llamagen-class", "llamagen-caption")
ANY = {"side": image_models.SIDE, "heads": 4}
Files = tuple[Path, Path]


def published(toy: Any, folder: Path, nest: str = "model", dtype: Any = torch.float32) -> Files:
    """Two files as the authors' scripts write them: what decodes nothing is in them, too."""
    public = {name: value.to(dtype) for name, value in to_public(toy).items()}
    begins = ("decoder.", "quantize.", "post_quant_conv.")
    picture = {name: value for name, value in public.items() if name.startswith(begins)}
    words = {name: value for name, value in public.items() if name not in picture}
    extra = {"encoder.conv_in.weight": torch.zeros(2), "quant_conv.bias": torch.zeros(2)}
    picture |= {**extra, "quantize.codebook_used": torch.zeros(65536)}
    words["freqs_cis"] = torch.zeros(3)
    folder.mkdir(exist_ok=True)
    torch.save({nest: words, "steps": 3, "args": Namespace(lr=1e-4)}, folder / "words.pt")
    torch.save({"model": picture, "optimizer": {"lr": 1e-4}}, folder / "picture.pt")
    return folder / "words.pt", folder / "picture.pt"


def changed(file: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    made = torch.load(file, weights_only=False)
    change(made["model"])
    torch.save(made, file)
    return file


@pytest.mark.parametrize(
    ("kind", "nest"), covering(tuple(KINDS), ("model", "module", "state_dict"), strength=1)
)
def test_published_files_draw_the_same_pictures(kind: str, nest: str, tmp_path: Path) -> None:
    toy = image_models.PAINTERS[kind]()
    files = published(toy, tmp_path / "files", nest)
    formats.convert("llamagen", files, **ANY).save_pretrained(tmp_path / "out")
    assert [one.suffix for one in (tmp_path / "out").glob("model*")] == [".safetensors"]
    fast = mmspec.accelerate(str(tmp_path / "out"), "sjd")
    for name, value in toy.state_dict().items():
        assert torch.equal(fast.model.state_dict()[name], value), name
    asked = {**image_models.request(kind, 2), "guidance": 2.0, "seed": 3}
    theirs = mmspec.accelerate(toy, "plain").generate_images(**asked)
    ours = fast.generate_images(**asked)
    assert ours.ids.equal(theirs.ids)
    assert np.array_equal(np.asarray(ours.images[1]), np.asarray(theirs.images[1]))


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = published(image_models.llamagen_class(), tmp_path / "files")
    out = tmp_path / "out"
    typed = ["convert", "llamagen", *map(str, files), "--set", "side=4", "--set", "heads=4"]
    assert main([*typed, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == "LlamaGenForImageGeneration"
    drawn = ["generate", "--model", str(out), "--prompt", "3", "--out", str(tmp_path / "x.png")]
    assert main([*drawn, "--no-compare"]) == 0
    assert (tmp_path / "x.png").is_file()
    assert main([*typed, "--out", str(out)]) == 1
    assert "holds something already" in capsys.readouterr().err
    assert main(["convert", "--json"]) == 0
    assert [one["format"] for one in json.loads(capsys.readouterr().out)] == formats.names()


def test_sizes_are_read_off_the_weights_and_the_rest_is_said(tmp_path: Path) -> None:
    words, picture = published(image_models.llamagen_class(), tmp_path)
    bare = formats.convert("llamagen", [words], **ANY)
    assert bare.vqmodel is None
    assert (
        bare.config.num_key_value_heads == image_models.llamagen_class().config.num_key_value_heads
    )
    for options, message in (
        ({"heads": 4}, "side= the codes along one side: 16 for 256 pixels"),
        ({"side": 4}, r"no published LlamaGen has 3 layers of width 32.*give heads="),
        ({"side": 4, "heads": 5}, "heads=5 do not cut a width of 32"),
        ({"side": 4, "heads": 32}, "heads=32 do not cut a width of 32"),
        ({"side": 0, "heads": 4}, "side=0 must be a whole number of at least 1"),
        ({**ANY, "rows": 4}, "unknown keyword rows for format llamagen"),
    ):
        with pytest.raises(ValueError, match=message):
            formats.convert("llamagen", [words, picture], **options)
    fused = {"layers.0.attention.wqkv.weight": torch.zeros(40, 32)}
    with pytest.raises(ValueError, match="heads=4 do not fit a projection of 40 rows"):
        formats.convert("llamagen", [changed(words, lambda one: one.update(fused))], **ANY)


def test_names_that_are_missing_or_foreign_are_refused(tmp_path: Path) -> None:
    words, picture = published(image_models.llamagen_class(), tmp_path)

    def refused(message: str, *files: Path) -> None:
        with pytest.raises(ValueError, match=message):
            formats.convert("llamagen", files, **ANY)

    refused(r"picture.pt lacks tok_embeddings.weight", picture, words)  # the other way round
    refused(r"has the files the language model, \[the image tokeniser\]; 0 were given")
    refused(r"no file .*nothing.pt", tmp_path / "nothing.pt")
    refused(
        r"words.pt holds 1 weights that LlamaGen does not have \(layers.0.bias\)",
        changed(words, lambda one: one.update({"layers.0.bias": torch.zeros(1)})),
        picture,
    )
    changed(words, lambda one: one.pop("layers.0.bias"))
    refused("lack norm.weight", changed(words, lambda one: one.pop("norm.weight")))
    refused(
        r"picture.pt lacks post_quant_conv.weight",
        published(image_models.llamagen_class(), tmp_path)[0],
        changed(picture, lambda one: one.pop("post_quant_conv.weight")),
    )


def test_two_dtypes_become_the_wider_one(tmp_path: Path) -> None:
    toy = image_models.llamagen_class()
    halves, _ = published(toy, tmp_path / "halves", dtype=torch.bfloat16)
    _, whole = published(toy, tmp_path / "whole")
    assert formats.convert("llamagen", [halves], **ANY).dtype == torch.bfloat16
    both = formats.convert("llamagen", [halves, whole], **ANY)
    assert {value.dtype for value in both.state_dict().values()} == {torch.float32}
    assert torch.equal(both.vqmodel.embedding.weight, toy.vqmodel.embedding.weight)
