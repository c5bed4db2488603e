"""Draft heads in a target's own checkpoint: found, loaded whole, exact, computed as published."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.cli import main
from mmspec.drafters.neural.feature_head import FeatureDraft
from mmspec.models.heads import native_mtp
from mmspec.models.heads.native_mtp import NativeMtpHead
from mmspec.models.loading import random_model
from mmspec.models.own_heads import find_weights
from mmspec.training.heads import EAGLE
from mmspec.training.trainable import train_head
from tests import toys
from tests.covering import covering, exhaustive, limited
from tests.drafters.heads import endless, greedy_example
from tests.toys.readers import backbone

ROOM, VOCABULARY = 10, 60
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5},
    **{"moe_intermediate_size": 16, "num_experts_per_tok": 2, "pad_token_id": 0},
    **{"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": None},
}
LINEAR: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}


def _qwen3_next() -> Any:
    experts: dict[str, Any] = {"num_experts": 4, "shared_expert_intermediate_size": 16}
    config = hf.Qwen3NextConfig(**SIZES, **LINEAR, **experts, num_hidden_layers=2)
    return hf.Qwen3NextForCausalLM(config)


def _qwen3_5_text() -> Any:
    """The text model alone, whose configuration has sections of M-RoPE all the same."""
    sizes = {name: one for name, one in SIZES.items() if "expert" not in name and "moe" not in name}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    rope |= {"partial_rotary_factor": 1.0, "mrope_interleaved": True}
    config = hf.Qwen3_5TextConfig(**sizes, **LINEAR, num_hidden_layers=2, rope_parameters=rope)
    return hf.Qwen3_5ForCausalLM(config)


def _deepseek_v3() -> Any:
    parts: dict[str, Any] = {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    latent: dict[str, Any] = {
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
    }
    sizes = {**SIZES, "num_key_value_heads": 4, "head_dim": 4}
    config = hf.DeepseekV3Config(**sizes, **parts, **latent, v_head_dim=8, num_hidden_layers=2)
    return hf.DeepseekV3ForCausalLM(config)


def _glm4_moe() -> Any:
    parts: dict[str, Any] = {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    return hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**SIZES, **parts, num_hidden_layers=2))


MAKERS: dict[str, Any] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5_text,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "qwen3_5": lambda: toys.model("qwen3_5", layers=4),  # reads images
}


def name_in_checkpoint(family: str, name: str, count: int) -> str:
    """The name of a weight of the head in a checkpoint of its family."""
    first, _, rest = name.partition(".")
    if family.startswith("qwen"):
        return f"mtp.{QWEN.get(first, first)}.{rest}"
    root = f"model.layers.{count}."
    if first == "layers":
        return root + rest.removeprefix("0.")
    return f"{root}shared_head.{name}" if first == "norm" else root + name


def write_checkpoint(family: str, folder: Path) -> NativeMtpHead:
    """Save a target with a head in its folder, under the published names; returns the head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = MAKERS[family]()
    text = target.config.get_text_config(decoder=True)
    target = target if family == "qwen3_5" else random_model(lambda: target, 0)
    target.save_pretrained(folder)
    made = random_model(lambda: native_mtp.new_head(target.get_decoder(), text), 1)
    head: NativeMtpHead = made
    with torch.no_grad():
        for name in ("enorm", "hnorm", "norm"):  # norms that matter
            head.get_parameter(f"{name}.weight").uniform_(0.5, 1.5)
    add_weights(family, folder, target, head)
    return head


def add_weights(family: str, folder: Path, target: Any, head: NativeMtpHead) -> None:
    """Add a head to a saved target; transformers writes its layer under the published names."""
    kind: Any = type(target.get_decoder())
    decoder = kind(native_mtp._small(head.config))
    decoder.layers.load_state_dict(head.layers.state_dict())
    with TemporaryDirectory() as scratch:
        decoder.save_pretrained(scratch)
        own = load_file(Path(scratch) / "model.safetensors")
    own = {name: one for name, one in own.items() if name.startswith("layers.")}
    outer = head.state_dict()
    own |= {name: outer[name] for name in outer if not name.startswith("layers.")}
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    file = folder / "model.safetensors"
    added = {name_in_checkpoint(family, name, count): one for name, one in own.items()}
    save_file({**load_file(file), **added}, file, {"format": "pt"})


@lru_cache(maxsize=8)
def checkpoint(family: str) -> tuple[TemporaryDirectory[str], NativeMtpHead]:
    folder = TemporaryDirectory()
    return folder, write_checkpoint(family, Path(folder.name))


def load_target(family: str) -> Any:
    folder, _ = checkpoint(family)
    kind: Any = type(MAKERS[family]())
    return kind.from_pretrained(folder.name, dtype=torch.float32).eval()


def requests(family: str, batch: int) -> dict[str, Tensor]:
    if family == "qwen3_5":
        return toys.inputs(family, batch=batch, ragged=batch > 1)
    noise = torch.Generator().manual_seed(batch)
    ids = torch.randint(3, VOCABULARY, (batch, 9), generator=noise)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        ids[row, : 2 * row], mask[row, : 2 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", exhaustive(MAKERS, [*MAKERS][::2]))
def test_a_head_is_loaded_whole(family: str) -> None:
    _, head = checkpoint(family)
    target = load_target(family)
    names = find_weights(target)
    found, ours = native_mtp.load_head(target, names).state_dict(), head.state_dict()
    assert found.keys() == ours.keys()
    assert all(torch.equal(found[name], ours[name]) for name in ours)


@pytest.mark.parametrize(("family", "batch"), limited(covering(MAKERS, [1, 3], strength=1), 3))
def test_the_default_recipe_uses_it_exactly(family: str, batch: int) -> None:
    target, given = load_target(family), requests(family, batch)
    fast = mmspec.accelerate(target)
    assert fast.recipe.name == "native-mtp"
    options = {"max_new_tokens": ROOM, "do_sample": False}
    out = fast.generate(**given, **options)
    assert out.stats.fallback is None
    assert out.stats.num_draft_tokens > 0
    assert torch.equal(out.sequences, target.generate(**given, **options))
    drawn = {"max_new_tokens": ROOM, "do_sample": True, "temperature": 0.8, "seed": 3}
    plain = mmspec.accelerate(target, "plain").generate(**given, **drawn).sequences
    assert torch.equal(fast.generate(**given, **drawn).sequences, plain)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_chains_of_any_length(length: int) -> None:
    target, given = load_target("glm4_moe"), requests("glm4_moe", 3)
    out = mmspec.accelerate(target, length=length).generate(
        **given, max_new_tokens=ROOM, do_sample=False
    )
    assert torch.equal(
        out.sequences, target.generate(**given, max_new_tokens=ROOM, do_sample=False)
    )


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_the_computation_is_the_published_one(family: str) -> None:
    """Two norms, one matrix with the embedding first, a layer, a norm; wrong variants differ."""
    _, head = checkpoint(family)
    width = head.config.hidden_size
    embeds, states = torch.randn(2, 1, 6, width)
    cos_sin = head.rotary_emb(embeds, position_ids=torch.arange(6)[None])
    mask = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)[None, None]

    def run(first: Tensor, second: Tensor) -> Tensor:
        both = torch.cat((head.enorm(first), head.hnorm(second)), -1) @ head.eh_proj.weight.T
        layer: Any = head.layers[0]
        out: Tensor = layer(
            both,
            attention_mask=mask,
            position_embeddings=cos_sin,
            position_ids=torch.arange(6)[None],
        )
        return out

    expected = run(embeds, states)
    found = head(embeds, states)
    assert_close(found, head.norm(expected))
    assert not torch.allclose(found, expected, atol=1e-2)
    assert not torch.allclose(found, head.norm(run(states, embeds)), atol=1e-2)


@pytest.mark.exhaustive
def test_a_trained_head_drafts_well_and_wrong_variants_do_not() -> None:
    """Trained on one answer; exchanged halves and a missing norm lose its acceptance."""
    target = load_target("glm4_moe")
    given = {"input_ids": requests("glm4_moe", 1)["input_ids"]}
    example, _ = greedy_example(target, given, 16)
    reader = backbone(target)
    head = native_mtp.load_head(target, find_weights(target))
    train_head(EAGLE, reader, head, endless(example), 120, rate=5e-3)

    def accepted(changed: NativeMtpHead) -> float:
        fast = mmspec.accelerate(target, "native-mtp", drafter=changed, length=3)
        out = fast.generate(**given, max_new_tokens=16, do_sample=False)
        return float(out.stats.mean_acceptance_length)

    trained = accepted(head)
    assert trained > 2.5
    with torch.no_grad():
        halves = head.eh_proj.weight.chunk(2, 1)
        head.eh_proj.weight.copy_(torch.cat(halves[::-1], 1))
        assert accepted(head) < trained - 1
        head.eh_proj.weight.copy_(torch.cat(halves, 1).roll(head.config.hidden_size, 1))


def test_a_saved_recipe_keeps_the_head(tmp_path: Path) -> None:
    target, given = load_target("qwen3_next"), requests("qwen3_next", 1)
    mmspec.accelerate(target).save_pretrained(tmp_path)
    again = mmspec.load(tmp_path, target)
    assert again.recipe.name == "native-mtp"
    out = again.generate(**given, max_new_tokens=4, do_sample=False)
    assert out.stats.num_draft_tokens > 0


def test_a_target_without_one_and_a_damaged_one(tmp_path: Path) -> None:
    plain = toys.model("llama")
    assert mmspec.accelerate(plain).recipe.name == "prompt-lookup"
    with pytest.raises(ValueError, match="native-mtp' needs a native MTP head"):
        mmspec.accelerate(plain, "native-mtp")
    write_checkpoint("glm4_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    damaged = (
        ("hnorm.weight", None, r"lacks or has unknown weights \(hnorm.weight\)"),
        ("input_layernorm.weight", None, r"lacks or has unknown weights \(layers.0.input_lay"),
        ("enorm.weight", torch.ones(7), r"enorm.weight of the draft head in .* is \(7,\)"),
    )
    for name, value, message in damaged:
        changed = {f"model.layers.2.{name}": value}
        kept = {key: one for key, one in {**whole, **changed}.items() if one is not None}
        save_file(kept, file, {"format": "pt"})
        target = hf.Glm4MoeForCausalLM.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            mmspec.accelerate(target)


def test_the_command_line_uses_it(capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = checkpoint("glm4_moe")
    assert main(["doctor", folder.name]) in (0, 1)
    assert "native-mtp" in capsys.readouterr().out


def test_a_draft_of_a_tree_is_read_as_its_paths() -> None:
    """A target without recurrent layers takes trees, too."""
    target, given = load_target("glm4_moe"), requests("glm4_moe", 2)
    fast = mmspec.accelerate(target, "native-mtp", tree=[2, 2])
    out = fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(
        out.sequences, target.generate(**given, max_new_tokens=ROOM, do_sample=False)
    )
    assert isinstance(FeatureDraft(backbone(target), checkpoint("glm4_moe")[1]).head, NativeMtpHead)


def test_a_decoder_without_the_parts_of_a_head_is_refused() -> None:
    config = hf.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=9)
    with pytest.raises(ValueError, match="GPT2Model has no layers or norm or rotary_emb"):
        native_mtp.new_head(hf.GPT2Model(config), config)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_it_drafts_as_transformers_does(family: str, tmp_path: Path) -> None:
    """A trained head needs the forwards of `generate(use_mtp=True)`, fewer with longer chains."""
    head = write_checkpoint(family, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_nextn_predict_layers": 1}))
    target: Any = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    given = {"input_ids": requests(family, 1)["input_ids"]}
    example, _ = greedy_example(target, given, 48)
    train_head(EAGLE, backbone(target), head, endless(example), 150, rate=5e-3)
    add_weights(family, tmp_path, target, head)
    target = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]  # of two layers, not 61
    how: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False}
    plain = target.generate(**given, **how)
    fast, longer = (mmspec.accelerate(target, length=length) for length in (1, 4))
    found, four = fast.generate(**given, **how), longer.generate(**given, **how)
    calls: list[int] = []
    target.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    theirs = target.generate(**given, **how, use_mtp=True)
    for one in (theirs, found.sequences, four.sequences):
        assert torch.equal(one, plain)
    assert abs(found.stats.target_calls + 1 - len(calls)) <= 1 < 47 - found.stats.target_calls
    assert four.stats.target_calls < found.stats.target_calls
