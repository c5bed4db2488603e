"""Every bundled checkpoint is a small folder that loads like any other."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from mmspec import zoo
from tests.covering import exhaustive

each = pytest.mark.parametrize("name", zoo.names())


def parts(model: Any) -> list[nn.Module]:
    """The networks of a pipeline, or the model itself."""
    found = getattr(model, "components", {"model": model}).values()
    return [part for part in found if isinstance(part, nn.Module)]


@each
def test_a_checkpoint_is_a_small_ordinary_folder(name: str) -> None:
    files = [file for file in zoo.path(name).rglob("*") if file.is_file()]
    assert zoo.is_present(name)
    assert max(file.stat().st_size for file in files) <= 6_000_000
    assert {file.suffix for file in files} <= {".jinja", ".json", ".md", ".safetensors"}
    card = (zoo.path(name) / "README.md").read_text()
    assert re.search(rf"^mmspec zoo train {name}( --minutes \d+)?$", card, re.MULTILINE)


@each
def test_a_checkpoint_does_not_say_where_it_was_made(name: str) -> None:
    for file in zoo.path(name).rglob("*config.json"):
        assert not json.loads(file.read_text()).get("_name_or_path", "").startswith("/")


LOADED = {(zoo.modality(name).name, zoo.info(name).target is None): name for name in zoo.names()}


@pytest.mark.parametrize("name", exhaustive(zoo.names(), LOADED.values()))
def test_models_load_in_eval_mode_and_in_float32(name: str) -> None:
    for part in parts(zoo.load(name)):
        assert not part.training
        assert {p.dtype for p in part.parameters()} == {torch.float32}
        assert all(p.isfinite().all() for p in part.parameters())


@pytest.mark.parametrize("name", LOADED.values())
def test_models_load_in_the_given_dtype(name: str) -> None:
    """A target and a draft model of each modality: they are loaded alike."""
    for part in parts(zoo.load(name, torch.bfloat16)):
        assert next(part.parameters()).dtype == torch.bfloat16


@each
def test_processors_read_words_or_say_who_does(name: str) -> None:
    if zoo.modality(name).name in ("mar", "diffusion"):
        with pytest.raises(ValueError, match=f"{name} .*has no processor"):
            zoo.processor(name)
        return
    processor = zoo.processor(name)
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = tokenizer("a small red circle", add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a small red circle"


def test_autoencoders_belong_to_those_that_draw_latents() -> None:
    assert zoo.vae("mar-drafter").config == zoo.vae("mar").config
    known = (
        "llava has no autoencoder of its own; choose one of: "
        "diffusion, diffusion-textured, diffusion-unet, mar"
    )
    with pytest.raises(ValueError, match=known):
        zoo.vae("llava")
