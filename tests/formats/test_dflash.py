"""DFlash heads in published layouts: written, read, and computed as the published classes do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu
from torch.testing import assert_close
from transformers import DynamicCache

from mmspec import formats
from mmspec.models.heads.dflash import DFlashHead, DFlashHeadConfig, uniform_layers
from tests.formats.test_eagle_3 import EPS, HEAD_DIM, HUB, INNER, KEPT, THETA, TOKENS, H, V

SLOTS, SIZE, MASK = 9, 4, 46
ONE_LAYER = {
    "self_attn.q_proj.weight": (4 * HEAD_DIM, H),
    "self_attn.k_proj.weight": (2 * HEAD_DIM, H),
    "self_attn.v_proj.weight": (2 * HEAD_DIM, H),
    "self_attn.o_proj.weight": (H, 4 * HEAD_DIM),
    "self_attn.q_norm.weight": (HEAD_DIM,),
    "self_attn.k_norm.weight": (HEAD_DIM,),
    "mlp.gate_proj.weight": (INNER, H),
    "mlp.up_proj.weight": (INNER, H),
    "mlp.down_proj.weight": (H, INNER),
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
}
PUBLISHED = {  # names of the authors' own checkpoints
    **{"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)},
    **{f"layers.{at}.{name}": shape for at in (0, 1) for name, shape in ONE_LAYER.items()},
}


def make_head(**changes: Any) -> DFlashHead:
    config = DFlashHeadConfig(
        hidden_size=H,
        vocab_size=V,
        intermediate_size=INNER,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        num_hidden_layers=2,
        block_size=SIZE,
        mask_token_id=MASK,
        num_taps=3,
        num_target_layers=8,
        **{"tapped_layers": [2, 4, 6], **changes},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = DFlashHead(config)
        for name, weight in head.named_parameters():  # norms that matter
            torch.nn.init.uniform_(weight, *((0.5, 1.5) if "norm" in name else (-0.3, 0.3)))
    if head.has_draft_vocabulary:
        head.set_draft_vocabulary(torch.tensor(TOKENS))
    head.train(False)
    return head


def draw_inputs() -> tuple[Tensor, Tensor]:
    """An embedding table of the target, and features of a context."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(size, generator=generator) for size in ((V, H), (1, SLOTS, 3 * H))]
    return drawn[0], drawn[1]


@torch.no_grad()
def run_head(head: DFlashHead, anchor: int, token: int) -> Tensor:  # (SIZE, D)
    """Normed states of a block whose anchor is at position `anchor`."""
    table, features = draw_inputs()
    cache, places = DynamicCache(), torch.arange(SLOTS + SIZE)[None]
    head.cache_context(head.fuse(features[:, :anchor]), places[:, :anchor], cache)
    block = table[torch.tensor([[token, *[MASK] * (SIZE - 1)]])]
    mask = torch.zeros(1, 1, SIZE, anchor + SIZE)
    out: Tensor = head(block, mask, places[:, anchor : anchor + SIZE], cache)
    return out[0]


@torch.no_grad()
def by_hand(weights: dict[str, Tensor], anchor: int, token: int) -> Tensor:  # (SIZE, D)
    """The same with torch alone, from published weights."""
    table, features = draw_inputs()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weights[f"{name}.weight"]

    def rotate(x: Tensor, places: Tensor) -> Tensor:  # (n, heads, width)
        angles = places[:, None] * THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def project(x: Tensor, name: str) -> Tensor:
        return (x @ weights[f"{name}.weight"].T).view(len(x), -1, HEAD_DIM)

    context = norm(features[0, :anchor] @ weights["fc.weight"].T, "hidden_norm")
    places, x = torch.arange(anchor + SIZE), table[[token, *[MASK] * (SIZE - 1)]]
    for at in (0, 1):
        own = f"layers.{at}.self_attn"
        normed = norm(x, f"layers.{at}.input_layernorm")
        both = torch.cat((context, normed))
        queries = rotate(norm(project(normed, f"{own}.q_proj"), f"{own}.q_norm"), places[anchor:])
        keys = rotate(norm(project(both, f"{own}.k_proj"), f"{own}.k_norm"), places)
        keys, values = keys.repeat_interleave(2, 1), project(both, f"{own}.v_proj")
        shares = torch.einsum("qhd,khd->hqk", queries, keys) / HEAD_DIM**0.5
        read = torch.einsum("hqk,khd->qhd", shares.softmax(-1), values.repeat_interleave(2, 1))
        x = x + read.flatten(1) @ weights[f"{own}.o_proj.weight"].T
        inner = norm(x, f"layers.{at}.post_attention_layernorm")
        mlp = f"layers.{at}.mlp"
        gate = silu(inner @ weights[f"{mlp}.gate_proj.weight"].T)
        wide = gate * (inner @ weights[f"{mlp}.up_proj.weight"].T)
        x = x + wide @ weights[f"{mlp}.down_proj.weight"].T
    return norm(x, "norm")


def test_the_layout_is_the_published_one(tmp_path: Path) -> None:
    formats.export("dflash", make_head(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(one.shape) for name, one in weights.items()} == PUBLISHED
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
    assert (config["block_size"], config["num_target_layers"]) == (SIZE, 8)


@pytest.mark.parametrize("anchor", [1, 5])
def test_a_block_is_computed_as_published(anchor: int, tmp_path: Path) -> None:
    head = make_head()
    formats.export("dflash", head, tmp_path)
    expected = by_hand(load_file(tmp_path / "model.safetensors"), anchor, 7)
    assert_close(run_head(head, anchor, 7), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cut", [None, KEPT])
@pytest.mark.parametrize("layout", ["dflash", "speculators"])
def test_there_and_back(layout: str, cut: int | None, tmp_path: Path) -> None:
    head = make_head(draft_vocab_size=cut, attention_bias=True)
    formats.export(layout, head, tmp_path, HUB)
    found = formats.convert(layout, [tmp_path])
    assert found.config.tapped_layers == [2, 4, 6]
    for name in ("block_size", "mask_token_id", "draft_vocab_size", "visual_slots", "positions"):
        assert getattr(found.config, name) == getattr(head.config, name)
    ours = head.state_dict()
    assert found.state_dict().keys() == ours.keys()
    assert all(torch.equal(one, ours[name]) for name, one in found.state_dict().items())


def test_published_layers_are_those_of_the_authors() -> None:
    """Ids of the configurations that SpecForge ships, for targets of 36 and 24 layers."""
    assert uniform_layers(36, 5) == (2, 10, 18, 26, 34)
    assert uniform_layers(24, 1) == (13,)
    assert min(uniform_layers(2, 5)) >= 1
    assert max(uniform_layers(2, 5)) <= 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"dflash_config": {"mask_token_id": MASK}}, "lacks target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 5]}}, "lacks mask_token_id"),
        ({"block_size": None}, "lacks block_size"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "only full attention"),
        ({"target_hidden_size": 2 * H}, "only equal widths"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"num_hidden_layers": 5}, "has 2 decoder layers"),
    ],
)
def test_what_is_not_supported_is_refused(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    formats.export("dflash", make_head(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    with pytest.raises(ValueError, match=words):
        formats.convert("dflash", [tmp_path])


def test_settings_of_successors_are_refused(tmp_path: Path) -> None:
    for name, value in (
        ("causal", True),
        ("sample_from_anchor", True),
        ("projector_type", "domino"),
        ("attention_value_scale", 0.5),
    ):
        formats.export("dflash", make_head(), tmp_path)
        file = tmp_path / "config.json"
        content = json.loads(file.read_text())
        content["dflash_config"][name] = value
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=name):
            formats.convert("dflash", [tmp_path])
    formats.export("dflash", make_head(), tmp_path)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="mask_embedding"):
        formats.convert("dflash", [tmp_path])


def test_a_table_of_its_own_is_refused(tmp_path: Path) -> None:
    formats.export("dflash", make_head(), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "embed_tokens.weight": torch.zeros(V, H)}, file)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight"):
        formats.convert("dflash", [tmp_path])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"visual_slots": "hidden"}, "visual_slots"),
        ({"tapped_layers": None}, "tapped_layers"),
        ({"tapped_layers": [4, 2, 6]}, "ascending order"),
        ({"tapped_layers": [0, 2, 6]}, "hidden state 0"),
    ],
)
def test_what_engines_cannot_read_is_not_written(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        formats.export("dflash", make_head(**changes), tmp_path)


def test_the_class_of_speculators_agrees(tmp_path: Path) -> None:
    """Where the library is installed: its own model computes the same from our folder."""
    models = pytest.importorskip("speculators.models.dflash")
    head = make_head(draft_vocab_size=KEPT)
    formats.export("speculators", head, tmp_path, HUB)
    config = models.DFlashSpeculatorConfig(**json.loads((tmp_path / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = models.DFlashDraftModel(config).train(False)
    missing, unknown = theirs.load_state_dict(load_file(tmp_path / "model.safetensors"), False)
    assert not unknown
    assert all(name.startswith(("verifier_", "embed_tokens")) for name in missing)
    table, features = draw_inputs()
    theirs.embed_tokens.weight.data.copy_(table)
    tokens = torch.arange(SLOTS)[None] + 3
    nothing = torch.zeros(1, SLOTS, H)
    with torch.no_grad():
        hidden, logits, _, _, places = theirs._backbone_forward(
            *(features, tokens, torch.ones(1, SLOTS), nothing, torch.zeros(1, SLOTS).long()),
            max_anchors=SLOTS - SIZE,
        )
    for block, anchor in enumerate(places.view(-1, SIZE)[:, 0].tolist()):
        own = run_head(head, anchor, anchor + 3)
        at = slice(block * SIZE, (block + 1) * SIZE)
        assert_close(hidden[0, at], own, atol=1e-5, rtol=1e-5)
        assert head.lm_head is not None
        assert_close(logits[0, at], head.lm_head(own), atol=1e-4, rtol=1e-4)
