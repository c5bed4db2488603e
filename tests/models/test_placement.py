"""Where weights are loaded: what is refused before a tensor is read, and what is honoured."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mmspec
from mmspec import zoo
from mmspec.models.loading import load_causal, random_model
from mmspec.models.placement import MAPS, Placement, list_devices

FOLDER = zoo.path("llava-text-drafter")
IDS = torch.tensor([[7, 8, 9, 7, 8, 9, 10, 11]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "warp"}, r"device='warp' is not available; give one of: cpu"),
        ({"device": "cuda:99"}, r"device='cuda:99' is not available; give one of: cpu"),
        ({"device": "meta"}, r"device='meta' is not available"),
        ({"dtype": "float99"}, r"dtype='float99' is no floating dtype; give float32, bfloat16"),
        ({"dtype": "int8"}, r"no floating dtype.*or quantize='int8'"),
        ({"dtype": "float8_e4m3fn"}, r"has no kernel for .* on cpu .*; give float32"),
        ({"device": "cpu", "device_map": "auto"}, r"both place the weights; give one of them"),
        ({"device_map": "everywhere"}, r"is no map; give one of auto, .* or a JSON file"),
        ({"attn": "telepathy"}, r"attn='telepathy' is not known; choose one of eager"),
        ({"attn": "flash_attention_2"}, r"takes no tree mask"),
        ({"quantize": "int3"}, r"quantize='int3' is not known; choose one of int8, int4"),
    ],
)
def test_what_is_not_there_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(**options)


def test_missing_packages_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.models.placement.find_spec", lambda name: None)
    for options, extra in (
        ({"quantize": "int8"}, "quantize"),
        ({"device_map": "auto"}, "placement"),
    ):
        with pytest.raises(ValueError, match=rf"install mmspec\[{extra}\]"):
            Placement(**options)


def test_the_cpu_is_always_there() -> None:
    assert list_devices()[0] == "cpu"
    assert Placement(device="cpu").torch_device == torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_dtype_and_attention_are_honoured(dtype: str, attn: str) -> None:
    model = load_causal(FOLDER, placement=Placement(dtype=dtype, attn=attn))
    assert model.dtype == getattr(torch, dtype)
    assert model.config._attn_implementation == attn


def test_an_attention_that_the_class_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", False)
    with pytest.raises(ValueError, match=r"attn='sdpa' is refused by the class.*give attn='eager'"):
        load_causal(FOLDER, placement=Placement(attn="sdpa"))


def test_a_map_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    for content, message in (
        ("[", "is no JSON"),
        ("[]", "holds no map"),
        ("{}", "holds no map"),
        ('{"": "cpu", "lm_head": "disk"}', "name all parts"),
        ('{"": "cuda:99"}', "is not available"),
    ):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            Placement(device_map=str(file))


@pytest.mark.parametrize("name", [*MAPS, "file"])
def test_maps_load_the_whole_model(name: str, tmp_path: Path) -> None:
    if name == "file":
        (tmp_path / "map.json").write_text('{"": "cpu"}', encoding="utf-8")
        name = str(tmp_path / "map.json")
    model = load_causal(FOLDER, torch.float32, placement=Placement(device_map=name))
    expected = zoo.load("llava-text-drafter").generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), expected)


def offload(folder: Path, parts: tuple[str, ...]) -> Any:
    """The text model with some parts on disk."""
    layers = [f"model.layers.{index}" for index in range(_config().num_hidden_layers)]
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", *layers]
    where = {name: "disk" if name in parts else "cpu" for name in names}
    (folder / "map.json").write_text(json.dumps(where), encoding="utf-8")
    return load_causal(FOLDER, torch.float32, placement=Placement(device_map=f"{folder}/map.json"))


def _config() -> Any:
    return LlamaConfig.from_pretrained(FOLDER)


@pytest.mark.parametrize("parts", [("model.layers.0",), ("model.embed_tokens", "lm_head")])
def test_offloaded_models_decode_as_they_do_in_memory(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    model = offload(tmp_path, parts)
    weight = model.get_submodule(parts[0]).parameters()
    assert next(weight).device.type == "meta"
    fast = mmspec.accelerate(model, "prompt-lookup")
    expected = zoo.load("llava-text-drafter").generate(IDS, max_new_tokens=12, do_sample=False)
    assert torch.equal(fast.generate(IDS, max_new_tokens=12).sequences, expected)


def test_large_trees_read_an_offloaded_target_seldom(tmp_path: Path) -> None:
    """SpecExec: every call reads the weights from disk, so their number is what counts."""
    model, drafter = offload(tmp_path, ("model.layers.0",)), zoo.load("llava-text-drafter")
    expected = drafter.generate(IDS, max_new_tokens=24, do_sample=False)
    with torch.no_grad():  # a worse draft model
        for weight in drafter.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    calls = {}
    for recipe in ("coupled", "specexec"):
        out = mmspec.accelerate(model, recipe, drafter=drafter).generate(IDS, max_new_tokens=24)
        assert torch.equal(out.sequences, expected)
        calls[recipe] = out.stats.target_calls
    assert calls["specexec"] < calls["coupled"]


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantized_models_decode_as_their_own_generate(bits: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, 64)
    model = load_causal(tmp_path, torch.float32, placement=Placement(quantize=bits))
    assert type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    assert not torch.equal(model(IDS).logits, load_causal(tmp_path)(IDS).logits)
    mask = torch.ones_like(IDS)
    expected = model.generate(IDS, attention_mask=mask, max_new_tokens=32, do_sample=False)
    drafters = (None, load_causal(tmp_path))
    for recipe, drafter in zip(("prompt-lookup", "coupled"), drafters, strict=True):
        fast = mmspec.accelerate(model, recipe, drafter=drafter)
        assert torch.equal(fast.generate(IDS, max_new_tokens=32).sequences, expected)


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_a_quantizer_that_fits_no_layer_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, 24)
    with pytest.raises(ValueError, match=r"quantize='int4' .*multiples of 32"):
        load_causal(tmp_path, placement=Placement(quantize="int4"))


def save_tiny(folder: Path, width: int) -> None:
    """Save a tiny Llama with random weights."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=width, intermediate_size=width, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    random_model(lambda: LlamaForCausalLM(config), 0).save_pretrained(folder)
