"""The attention tap against the eager attention of the same layer."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmspec.targets.backbone import Backbone
from mmspec.targets.hooks import AttentionHook, second_full
from tests import toys
from tests.toys import readers as families

torch.set_num_threads(1)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
@torch.no_grad()
def test_the_tap_is_the_attention_of_eager(family: str, ragged: bool) -> None:
    model = toys.model(family)
    inputs = toys.inputs(family, batch=3 if ragged else 1, ragged=ragged)
    backbone = Backbone(model, families.family(model))
    layer = second_full(backbone.config)
    _, logits, _ = backbone.prefill(inputs, room=8)  # transformers puts hooks of its own in here
    hooks = [len(part._forward_hooks) for part in model.modules()]
    with AttentionHook(backbone) as tap:
        _, tapped, _ = backbone.prefill(inputs, room=8)
    assert [len(part._forward_hooks) for part in model.modules()] == hooks
    assert torch.equal(tapped, logits)
    eager = toys.model(family)
    eager.set_attn_implementation("eager")
    out = eager(**inputs, output_attentions=True)
    assert tap.attention is not None
    expected = out.attentions[layer][:, :, -1].mean(1)
    assert_close(tap.attention, expected, atol=1e-5, rtol=1e-4)
    assert_close(tap.attention.sum(-1), torch.ones(len(tap.attention)))


def test_eager_models_are_refused() -> None:
    model = toys.model("llava")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="only be tapped from sdpa, not 'eager'"):
        AttentionHook(Backbone(model, families.family(model)))
