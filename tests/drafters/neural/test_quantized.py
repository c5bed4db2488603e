"""The target in lower precision drafts on the target's own cache, and changes nothing of it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import mmspec
from mmspec.drafters.neural.quantized import Int8Linear, quantizer
from tests import toys

ROOM = 14
PRECISIONS = (
    "int8",
    pytest.param("bfloat16", marks=pytest.mark.exhaustive),
    pytest.param(
        "int4", marks=pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao")
    ),
)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["llava", pytest.param("gemma3", marks=pytest.mark.exhaustive)])
def test_greedy_output_is_the_targets_own(family: str, precision: str) -> None:
    model = toys.model(family, layers=2)
    request = toys.inputs(family, batch=2, ragged=True)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    fast = mmspec.accelerate(model, "qspec", precision=precision)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.num_accepted_draft_tokens > 0
    after = model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_scores_of_the_draft_layers_would_be_noticed() -> None:
    """Negative control: the target scores with the layers of the draft, of few bits."""
    model, request = toys.model("llama", layers=2), toys.inputs("llama")
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    fast = mmspec.accelerate(model, "qspec", precision="int8")
    bound: Any = fast.session.bound
    coarse = bound.drafter.model.draft_reader
    for layer in coarse.decoder.modules():
        if isinstance(layer, Int8Linear):
            layer.weight.copy_(layer.weight // 32 * 32)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)  # a worse draft is still only a draft
    bound.target = replace(bound.target, backbone=coarse, checks=False)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert not torch.equal(out.sequences, expected)


def test_integers_come_close_to_the_layer() -> None:
    noise = torch.Generator().manual_seed(0)
    linear = nn.Linear(48, 32)
    x = torch.randn(2, 3, 48, generator=noise)
    own, coarse = linear(x), Int8Linear(linear)(x)
    assert coarse.shape == own.shape
    assert (coarse - own).abs().max() < 0.02 * own.abs().max()
    assert Int8Linear(linear)(torch.zeros(1, 48)).isfinite().all()  # no scale of 0
    assert quantizer("bfloat16")(linear)(x).dtype == x.dtype


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"precision='int3' is none of int8, int4"):
        mmspec.accelerate(toys.model("llama", layers=2), "qspec", precision="int3")
