"""Models from folders: whole, of safetensors, and without code of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmspec
from mmspec import recipes
from mmspec.modalities.common.tiny_models import random_drafter
from mmspec.modalities.image.tiny_models import SETTINGS, class_request, tiny_model
from mmspec.models.heads.eagle3 import load_eagle3_head
from mmspec.models.llamagen import LlamaGenForImageGeneration
from mmspec.models.loading import load_causal
from tests import toys


def test_weights_that_do_not_cover_the_model_are_refused(tmp_path: Path) -> None:
    toys.model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    some = "model.layers.1.mlp.up_proj.weight"
    del weights[some]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"no weights for 1 parts of a LlamaForC.*{some}"):
        load_causal(tmp_path)


def test_weights_of_another_size_are_named(tmp_path: Path) -> None:
    """Of a target, and of a head, whose config.json is another one's."""
    toys.model("llama").save_pretrained(tmp_path / "target")
    random_drafter(recipes.get("eagle-3"), toys.model("llama"), 0).save_pretrained(
        tmp_path / "head"
    )
    for name, load in (("target", load_causal), ("head", load_eagle3_head)):
        file = tmp_path / name / "config.json"
        config = json.loads(file.read_text())
        wide = 2 * config["intermediate_size"]
        file.write_text(json.dumps({**config, "intermediate_size": wide}))
        with pytest.raises(
            ValueError, match=rf"{name} does not fit together: .*down_proj.*{wide}\)"
        ):
            load(tmp_path / name)


def test_a_head_of_another_kind_is_named_before_its_weights_are_read(tmp_path: Path) -> None:
    random_drafter(recipes.get("eagle"), toys.model("llama"), 0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"type 'feature_head', no EAGLE-3 head \('eagle3_head'\)"):
        load_eagle3_head(tmp_path)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    model = toys.model("llama")
    config = type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": True})
    tied: Any = type(model)(config)
    tied.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = load_causal(tmp_path)
    assert torch.equal(loaded.lm_head.weight, tied.model.embed_tokens.weight)


def test_code_beside_the_weights_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any) -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    toys.model("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    own = {"model_type": "stranger", "auto_map": {"AutoConfig": "code.Config"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    (tmp_path / "code.py").write_text("raise AssertionError('was run')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_causal(tmp_path)


def test_a_draft_model_is_loaded_by_the_class_of_its_target(tmp_path: Path) -> None:
    """LlamaGen is unknown to transformers' auto classes."""
    target = tiny_model()
    random_drafter(mmspec.recipes.get("coupled"), target).save_pretrained(tmp_path)
    fast = mmspec.accelerate(target, "coupled", drafter=tmp_path)
    assert isinstance(fast.session.bound.draft_model.model, LlamaGenForImageGeneration)
    assert fast.generate_images(**class_request(1), **SETTINGS, seed=0).stats.num_draft_tokens > 0
