"""P-EAGLE heads in published layouts: written, read, and computed as the published class does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from mmspec import formats
from mmspec.formats.eagle_3 import IDS
from mmspec.models.heads.p_eagle import PEagleHead, PEagleHeadConfig
from tests.formats.test_eagle_3 import (
    EPS,
    HEAD_DIM,
    HUB,
    INNER,
    KEPT,
    SLOTS,
    THETA,
    TOKENS,
    H,
    V,
    draw_inputs,
)

MASK, DEPTHS = 46, 4


def make_head(**changes: Any) -> PEagleHead:
    config = PEagleHeadConfig(
        hidden_size=H,
        vocab_size=V,
        intermediate_size=INNER,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        **{
            "draft_vocab_size": KEPT,
            "visual_slots": "placeholder",
            "num_hidden_layers": 2,
            "num_depths": DEPTHS,
            "mask_token_id": MASK,
            "tapped_layers": [1, 3, 5],
            **changes,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = PEagleHead(config)
        for name, weight in head.named_parameters():
            torch.nn.init.uniform_(weight, *((0.5, 1.5) if "norm" in name else (-0.3, 0.3)))
    if head.has_draft_vocabulary:
        head.set_draft_vocabulary(torch.tensor(TOKENS))
    head.train(False)
    return head


@torch.no_grad()
def run_head(head: PEagleHead, anchor: int) -> Tensor:  # (DEPTHS, V')
    """Logits of a draft after true slot `anchor`."""
    embeds, features = draw_inputs()
    assert head.embeddings is not None
    unknown = head.embeddings(torch.full((1, DEPTHS - 1), MASK))
    inputs = torch.cat((embeds[:, : anchor + 1], unknown), 1)
    states = head.fuse(features[:, : anchor + 1])
    states = torch.cat((states, head.mask_states(DEPTHS - 1)), 1)
    out = head(inputs, states)[0, anchor:]
    return head.logits(out, lambda _: pytest.fail("a head has its own output head"))


@pytest.mark.parametrize("is_qwen", [False, True])
def test_the_layout_is_that_of_eagle_3_and_two_more(is_qwen: bool, tmp_path: Path) -> None:
    head = make_head(own_embeddings=True, qk_norm=is_qwen)
    formats.export("p-eagle", head, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["mask_hidden"].shape == (1, 1, 3 * H)
    assert weights["embed_tokens.weight"].shape == (V, H)
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (H, 2 * H)
    assert weights["layers.1.self_attn.q_proj.weight"].shape == (H, H)
    config = json.loads((tmp_path / "config.json").read_text())
    kind = "Eagle3Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLMEagle3"
    assert config["architectures"] == [kind]
    assert config["ptd_token_id"] == MASK
    assert config["eagle_config"][IDS] == [1, 3, 5]


@pytest.mark.parametrize("own", [False, True])
def test_there_and_back_in_the_layout_of_vllm(own: bool, tmp_path: Path) -> None:
    head = make_head(own_embeddings=own, norm_before_residual=True)
    formats.export("p-eagle", head, tmp_path)
    check_same(formats.convert("p-eagle", [tmp_path], num_depths=str(DEPTHS)), head)
    assert formats.convert("p-eagle", [tmp_path]).config.num_depths == 8


def test_there_and_back_in_the_layout_of_speculators(tmp_path: Path) -> None:
    head = make_head(own_embeddings=True, sliding_window=5, qk_norm=True)
    formats.export("speculators", head, tmp_path, HUB)
    check_same(formats.convert("speculators", [tmp_path]), head)
    with pytest.raises(ValueError, match="own_embeddings"):
        formats.export("speculators", make_head(), tmp_path, HUB)


def check_same(found: PEagleHead, head: PEagleHead) -> None:
    for name in ("num_depths", "mask_token_id", "own_embeddings", "norm_before_residual"):
        assert getattr(found.config, name) == getattr(head.config, name)
    ours = head.state_dict()
    assert found.state_dict().keys() == ours.keys()
    assert all(torch.equal(one, ours[name]) for name, one in found.state_dict().items())


def test_heads_without_a_mask_are_refused(tmp_path: Path) -> None:
    formats.export("p-eagle", make_head(), tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    content.pop("ptd_token_id")
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="none of mask_token_id, pard_token, ptd_token_id"):
        formats.convert("p-eagle", [tmp_path])
    for name in ("mask_token_id", "pard_token"):
        file.write_text(json.dumps({**content, name: 3}))
        assert formats.convert("p-eagle", [tmp_path]).config.mask_token_id == 3
    file.write_text(json.dumps({**content, "pard_token": V}))
    with pytest.raises(ValueError, match=f"mask_token_id={V} is not a token"):
        formats.convert("p-eagle", [tmp_path])
    with pytest.raises(ValueError, match="num_depths='many'"):
        formats.convert("p-eagle", [tmp_path], num_depths="many")
    with pytest.raises(ValueError, match="mask_hidden"):
        formats.convert("vllm", [tmp_path])


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "norm_before_residual": True}])
def test_the_class_of_speculators_agrees(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library is installed: its own model computes the same from our folder."""
    models = pytest.importorskip("speculators.models.peagle")
    head = make_head(own_embeddings=True, **changes)
    formats.export("speculators", head, tmp_path, HUB)
    config = models.PEagleSpeculatorConfig(**json.loads((tmp_path / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = models.PEagleDraftModel(config).train(False)
    missing, unknown = theirs.load_state_dict(load_file(tmp_path / "model.safetensors"), False)
    assert not unknown
    assert all(name.startswith("verifier_") for name in missing)
    embeds, features = draw_inputs()
    for one in (theirs.embed_tokens, head.embeddings):
        assert isinstance(one, nn.Embedding)
        one.weight.data[:SLOTS] = embeds[0]
    anchors, depths = torch.arange(SLOTS), torch.zeros(SLOTS, dtype=torch.int64)
    for depth in range(1, DEPTHS):
        more = torch.arange(SLOTS - DEPTHS + 1)
        anchors, depths = torch.cat((anchors, more)), torch.cat((depths, 0 * more + depth))
    sample = "speculators.models.peagle.core.generate_cod_sample_indices"
    monkeypatch.setattr(sample, lambda **_: (anchors, depths))
    found: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, args, out: found.append(out[0]))
    with torch.no_grad():
        theirs(
            features,
            torch.arange(SLOTS)[None],
            torch.zeros(1, SLOTS).long(),
            verifier_last_hidden_states=torch.zeros(1, SLOTS, H),
            loss_config={"none": (lambda logits, targets: logits.sum(-1), 1.0)},
        )
    for anchor in range(SLOTS - DEPTHS + 1):
        expected = run_head(head, anchor)
        for depth in range(DEPTHS):
            at = ((anchors == anchor) & (depths == depth)).nonzero()[0, 0]
            assert_close(found[0][at], expected[depth], atol=1e-5, rtol=1e-5)
