"""Draft models of another target, or of another vocabulary, are refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mmspec
from mmspec import formats, zoo
from mmspec.drafters.neural.feature_head import check_head
from mmspec.models.compatibility import (
    BODY,
    KEY,
    check_signature,
    check_vocabularies,
    check_vocabulary_sizes,
    find_body_change,
    fingerprint,
    fingerprint_body,
    sign_head,
)
from mmspec.models.heads.dflash import DFlashHead, DFlashHeadConfig
from mmspec.models.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from mmspec.models.heads.feature_head import load_head
from tests import toys
from tests.drafters.heads import untrained_head
from tests.drafters.state_heads import target
from tests.toys.readers import backbone

Table = dict[str, int]


def _another(family: str) -> object:
    """The same sizes, with another output head."""
    other = toys.model(family)
    with torch.no_grad():
        other.get_output_embeddings().weight.normal_(generator=torch.Generator().manual_seed(9))
    return other


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_5_vl"])
def test_dtypes_of_one_target_pass_and_another_target_does_not(family: str) -> None:
    head = untrained_head(toys.model(family))
    sign_head(head, backbone(toys.model(family)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_signature(head, backbone(toys.model(family).to(dtype)))
    with pytest.raises(ValueError, match=r"FeatureHead was made for another target than"):
        mmspec.accelerate(_another(family), "eagle-2", drafter=head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lossy_recipe_warns_of_weights_that_were_trained_on(dtype: torch.dtype) -> None:
    """Of the head's own target in another dtype it does not, and exact recipes never do."""
    head, own, changed = (untrained_head(toys.model("llama")), *map(toys.model, ["llama"] * 2))
    sign_head(head, backbone(own))
    weight = changed.get_output_embeddings().weight
    with torch.no_grad():
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
        weight += 0.15 * weight.std() * noise
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mmspec.accelerate(own.to(dtype), "eagle", drafter=head, verifier="rank-gap")
        mmspec.accelerate(changed, "eagle", drafter=head)
    with pytest.warns(UserWarning, match=r"other weights than .* agree to 0\.9\d+, .* is lossy"):
        mmspec.accelerate(changed.to(dtype), "eagle", drafter=head, verifier="rank-gap")


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_a_lossy_recipe_warns_of_a_decoder_that_was_trained_on(family: str) -> None:
    """A low-rank change of one kind of layer behind the same output head, merged or an adapter."""

    def bind(target: Any, **parts: Any) -> None:
        mmspec.accelerate(target, "eagle", drafter=head, **{"verifier": "rank-gap", **parts})

    head, own, changed = (untrained_head(toys.model(family)), *map(toys.model, [family] * 2))
    sign_head(head, backbone(own))
    noise = torch.Generator().manual_seed(3)
    layers: Any = backbone(changed).layers
    for layer in layers:
        weight = layer.self_attn.v_proj.weight
        low, up = (torch.randn(size, 2, generator=noise) for size in weight.shape)
        with torch.no_grad():
            weight += 0.02 * weight.norm() * (low @ up.T) / (low @ up.T).norm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            bind(own.to(dtype))
        bind(changed, verifier=None)
        changed.config.quantization_config = {"quant_method": "of another kind"}
        bind(changed)  # its rounding is as large
        del changed.config.quantization_config
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.warns(UserWarning, match=r"layers of their decoders differ by up to [1-9]\."):
            bind(changed.to(dtype))


def test_an_adapter_counts_as_a_change_once_it_was_trained() -> None:
    peft = pytest.importorskip("peft")
    head, own = untrained_head(toys.model("qwen2_5_vl")), toys.model("qwen2_5_vl")
    sign_head(head, backbone(own))
    settings = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2)
    peft.inject_adapter_in_model(settings, own)
    own.eval()
    assert find_body_change(head, backbone(own)) is None
    assert fingerprint_body(backbone(own)).keys() == vars(head.config)[BODY].keys()
    for name, weight in own.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    assert find_body_change(head, backbone(own)) is not None


def test_a_head_keeps_the_note_of_the_target_that_it_was_trained_for(tmp_path: Path) -> None:
    head, changed = untrained_head(toys.model("llama")), toys.model("llama")
    sign_head(head, backbone(toys.model("llama")))
    layers: Any = backbone(changed).layers
    with torch.no_grad():
        layers[0].self_attn.q_proj.weight.mul_(1.1)
    mmspec.accelerate(changed, "eagle", drafter=head).save_pretrained(tmp_path)
    assert find_body_change(load_head(tmp_path / "drafter"), backbone(changed)) is not None


def test_a_note_is_written_when_a_head_is_saved_and_read_with_it(tmp_path: Path) -> None:
    """An old head without a note loads; what `save_pretrained` writes of it has one."""
    target, head = toys.model("llama"), untrained_head(toys.model("llama"))
    head.save_pretrained(tmp_path / "old")
    assert KEY not in vars(load_head(tmp_path / "old").config)
    mmspec.accelerate(_another("llama"), "eagle", drafter=tmp_path / "old")
    mmspec.accelerate(target, "eagle", drafter=tmp_path / "old").save_pretrained(tmp_path / "new")
    drafter = tmp_path / "new" / "drafter"
    assert vars(load_head(drafter).config)[KEY] == fingerprint(backbone(target))
    mmspec.accelerate(target, "eagle", drafter=drafter)
    with pytest.raises(ValueError, match="made for another target"):
        mmspec.accelerate(_another("llama"), "eagle", drafter=drafter)


@pytest.mark.parametrize("name", ["vllm", "sglang", "angelslim", "speculators", "dflash"])
def test_the_last_layer_is_not_that_of_an_engine(name: str, tmp_path: Path) -> None:
    """Engines read its states before the final norm; a head is refused in both directions."""
    reader, layers = backbone(target("llava")), 7
    kinds: dict[str, Any] = {"visual_slots": "placeholder"}
    kinds = {"num_hidden_layers": 1, "num_taps": 3} if name == "dflash" else kinds
    for last, is_refused in ((layers - 1, False), (layers, True)):
        config = DFlashHeadConfig if name == "dflash" else Eagle3HeadConfig
        maker = DFlashHead if name == "dflash" else Eagle3Head
        made = config.of(reader.config, reader.vocabulary, tapped_layers=[1, 3, last], **kinds)
        folder = tmp_path / str(last)
        hub = {"target": "someone/model"} if name == "speculators" else {}
        formats.export(name, maker(made), folder, **hub)
        read = formats.convert(name, [folder])
        read.save_pretrained(tmp_path / f"read-{last}")
        again = maker.from_pretrained(tmp_path / f"read-{last}")
        signed = maker(made)
        sign_head(signed, reader)
        if not is_refused:
            check_head(again, reader)
            formats.export(name, signed, tmp_path / "again", **hub)
            continue
        for one in (read, again):
            with pytest.raises(ValueError, match=r"taps the target's last layer \(tapped_lay.*7\]"):
                check_head(one, reader)
        with pytest.raises(ValueError, match=r"last layer after the final norm .*7\]"):
            formats.export(name, signed, tmp_path / "again", **hub)
        check_head(signed, reader)


def test_a_target_without_weights_has_no_fingerprint() -> None:
    with torch.device("meta"):
        blank = toys.model("llama").to("meta")
    assert fingerprint(backbone(blank)) is None


def folder(path: Path, change: Callable[[Table], Table], added: list[Any] | None = None) -> str:
    """The zoo's tokenizer with another table."""
    made = json.loads((zoo.path("llava") / "tokenizer.json").read_text())
    made["model"]["vocab"] = change(made["model"]["vocab"])
    made["added_tokens"] = made["added_tokens"] if added is None else added
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(made))
    return str(path)


def turned(table: Table) -> Table:
    """As many tokens, behind other ids."""
    return dict(zip(table, reversed(table.values()), strict=True))


def test_an_equal_number_of_other_tokens_is_refused(tmp_path: Path) -> None:
    target, other = str(zoo.path("llava")), folder(tmp_path / "other", turned)
    with pytest.raises(ValueError, match=r"other cannot draft for .*llava: only \d+ of 1\d\d ids"):
        check_vocabularies(target, other)
    check_vocabularies(target, folder(tmp_path / "same", dict))
    check_vocabularies(
        target, folder(tmp_path / "spaced", lambda table: dict(reversed(table.items())))
    )


def test_a_model_from_such_a_folder_cannot_draft(tmp_path: Path) -> None:
    """Given as an object and by name; the vocabularies are equal."""
    target, small = zoo.load("llava"), zoo.load("llava-drafter")
    small.save_pretrained(tmp_path / "whole")
    table = folder(tmp_path / "other", turned)
    (Path(table) / "tokenizer.json").rename(tmp_path / "whole" / "tokenizer.json")
    own = small.config._name_or_path
    try:
        small.config._name_or_path = str(tmp_path / "whole")
        for drafter in (small, str(tmp_path / "whole")):
            with pytest.raises(ValueError, match="choose a draft model with the target's token"):
                mmspec.accelerate(target, "pearl", drafter=drafter)
    finally:
        small.config._name_or_path = own
    mmspec.accelerate(target, "coupled", drafter=small)


@pytest.mark.parametrize("recipe", ["coupled", "speculative-sampling", "spec-infer"])
def test_a_smaller_vocabulary_is_refused_when_it_is_bound(recipe: str) -> None:
    """An id beyond it would fail in the middle of a request; padding to round sizes passes."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = toys.model("llama")
    own = int(model.config.vocab_size)
    for size in (own // 2, own - 5, own + 5):
        config = LlamaConfig(vocab_size=size, num_attention_heads=2, **sizes)
        with pytest.raises(
            ValueError, match=f"vocabulary of {size} tokens, the target one of {own}"
        ):
            mmspec.accelerate(model, recipe, drafter=LlamaForCausalLM(config).eval())
    check_vocabulary_sizes(152_064, 151_936)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"vocab": 5}}'])
def test_what_tells_nothing_refuses_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    check_vocabularies(str(zoo.path("llava")), str(tmp_path))
    check_vocabularies(str(zoo.path("llava")), "some/name")
    check_vocabularies("", str(tmp_path))
