"""Attention and hidden states tapped beside a prefill, against the eager model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec import _hf
from mmspec.targets.readers.attention_tap import (
    ATTENTION_FEATURES,
    FIRST,
    HEADS,
    LAST,
    MEAN,
    AttentionTap,
    ClassTokenTap,
    count_question_tokens,
    full_layers,
)
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.hooks import SnapshotHook
from tests import toys
from tests.toys import readers as families

torch.set_num_threads(1)

TAPPED = ("llava", "qwen2_5_vl", "gemma3")


def eager(family: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Attention of every layer (B, heads, L, L)."""
    model = toys.model(family, layers=3)
    model.set_attn_implementation("eager")
    found: list[Tensor] = list(model(**inputs, output_attentions=True).attentions)
    return found


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("family", TAPPED)
@torch.no_grad()
def test_the_tap_is_the_attention_of_eager(family: str, ragged: bool) -> None:
    inputs = toys.inputs(family, batch=3 if ragged else 1, ragged=ragged)
    backbone: Any = families.backbone(toys.model(family, layers=3))
    rows = count_question_tokens(inputs, backbone.visual_ids)
    _, logits, _ = backbone.prefill(
        inputs, extra_slots=8
    )  # transformers puts hooks of its own in here
    hooks = [len(part._forward_hooks) for part in backbone.model.modules()]
    with AttentionTap(backbone, ATTENTION_FEATURES, rows) as tap:
        _, tapped, _ = backbone.prefill(inputs, extra_slots=8)
    assert [len(part._forward_hooks) for part in backbone.model.modules()] == hooks
    assert torch.equal(tapped, logits)
    layers, found = eager(family, inputs), tap.offer()
    full = full_layers(backbone.config)
    assert_close(found[FIRST], layers[full[1]][:, :, -1].mean(1), atol=1e-5, rtol=1e-4)

    def asked(attention: Tensor) -> Tensor:  # (B, heads, L, L) -> (B, heads, L)
        means = [one[:, -rows[at] :].mean(1) for at, one in enumerate(attention)]
        return torch.stack(means)

    assert_close(found[LAST], asked(layers[full[-1]]).mean(1), atol=1e-5, rtol=1e-4)
    every = torch.stack([asked(layers[at]).mean(1) for at in full]).mean(0)
    assert_close(found[MEAN], every, atol=1e-5, rtol=1e-4)
    groups = backbone.config.num_key_value_heads
    for layer, own in zip(layers, found[HEADS].values(), strict=True):
        grouped = asked(layer).unflatten(1, (groups, -1)).mean(2)
        assert_close(own.unflatten(1, (groups, -1)).mean(2), grouped, atol=1e-5, rtol=1e-4)
        assert_close(own.sum(-1), torch.ones_like(own[..., 0]))


def test_a_question_is_the_text_behind_the_last_picture() -> None:
    ids = torch.tensor([[0, 1, 9, 9, 2, 3], [1, 9, 2, 9, 8, 4], [5, 6, 7, 1, 2, 9], [1] * 6])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], *([1] * 6 for _ in range(3))])
    request = {"input_ids": ids, "attention_mask": mask}
    assert count_question_tokens(request, (9, 8)) == [2, 1, 1, 1]


@pytest.mark.parametrize("required_features", sorted(ATTENTION_FEATURES))
def test_eager_models_are_refused(required_features: str) -> None:
    model = toys.model("llava")
    model.set_attn_implementation("eager")
    backbone = Backbone(model, families.find_family(toys.model("llava")))
    with pytest.raises(ValueError, match="only be tapped from sdpa, not 'eager'; load Llava"):
        AttentionTap(backbone, frozenset({required_features}))


def test_models_that_attend_to_no_picture_are_refused() -> None:
    with pytest.raises(ValueError, match="reads its source in an encoder"):
        AttentionTap(families.backbone(toys.model("whisper")), frozenset({FIRST}))
    with pytest.raises(ValueError, match="encoder; choose a compressor that needs no hidden"):
        SnapshotHook(families.backbone(toys.model("whisper")))
    sliding = families.backbone(toys.model("gemma3-text", layer_types=["sliding_attention"] * 2))
    with pytest.raises(ValueError, match="has no full-attention layer to tap"):
        AttentionTap(sliding, frozenset({FIRST}))


@pytest.mark.parametrize("family", TAPPED)
@torch.no_grad()
def test_snapshots_are_hidden_states_of_the_model(family: str) -> None:
    inputs = toys.inputs(family, batch=3, ragged=True)
    backbone: Any = families.backbone(toys.model(family, layers=3))
    with SnapshotHook(backbone) as early:
        backbone.prefill(inputs, extra_slots=8)
    states = backbone.model(**inputs, output_hidden_states=True).hidden_states
    assert_close(early.offer(), torch.stack((states[0], states[2])), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_class_tokens_attention_is_that_of_the_layer_whose_features_are_read() -> None:
    model, inputs = toys.model("llava"), toys.inputs("llava", batch=3)
    with ClassTokenTap(model, families.find_family(model)) as tap:
        _hf.encode_media(model, inputs)
    tower = toys.model("llava").model.vision_tower
    tower.set_attn_implementation("eager")
    out = tower(inputs["pixel_values"], output_attentions=True)
    assert model.config.vision_feature_layer == -2  # of three layers, so the second
    expected = out.attentions[1][:, :, 0, 1:].mean(1)
    assert_close(torch.stack(tap.attention), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "paligemma", "llava_next", "llama"])
def test_towers_without_a_class_token_are_refused(family: str) -> None:
    model = toys.model(family)
    with pytest.raises(ValueError, match="gives no class token"):
        ClassTokenTap(model, families.find_family(model))
