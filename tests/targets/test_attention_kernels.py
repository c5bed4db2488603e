"""Kernels of attention other than sdpa and eager: measured on the first request, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import mmspec
from mmspec.drafters.oracle import Oracle
from mmspec.targets.readers import check
from mmspec.trees import Tree
from tests import toys

ROOM = 6
WIDE = Tree.branching([2, 2, 1])
SHAPES: dict[str, tuple[int, Any]] = {"chain": (1, 4), "tree": (1, WIDE), "ragged": (3, WIDE)}


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    check.clear_cache()
    yield
    check.clear_cache()


def drafted(model: Any, request: dict[str, Tensor], shape: Any) -> tuple[Any, Tensor]:
    """Our output and the model's own tokens."""
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    rows = expected[:, -ROOM:].tolist()
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle(rows, 0.4, tree=shape, seed=1))
    return fast.generate(**request, max_new_tokens=ROOM, do_sample=False), expected


def assert_flexible(family: str, batch: int, shape: Any, device: str = "cpu") -> None:
    model = toys.model(family, layers=3).to(device)
    model.set_attn_implementation(
        {"text_config": "flex_attention"} if family in toys.VLMS else "flex_attention"
    )
    given = toys.inputs(family, batch=batch, ragged=batch > 1)
    request = {name: value.to(device) for name, value in given.items()}
    ours, expected = drafted(model, request, shape)
    assert torch.equal(ours.sequences, expected)
    assert check._verdicts
    assert not any(verdict.stepwise for verdict in check._verdicts.values())


FLEXIBLE = ("llama", "mistral-sliding", "gemma3", "llava")


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", "ragged"),
        ("mistral-sliding", "tree"),
        pytest.param("gemma3", "chain", marks=pytest.mark.exhaustive),
        pytest.param("llava", "ragged", marks=pytest.mark.exhaustive),
    ],
)
def test_flex_attention_takes_our_masks(family: str, shape: str) -> None:
    """Its own code, not compiled."""
    with torch.compiler.set_stance("force_eager"):
        assert_flexible(family, *SHAPES[shape])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_flex_attention_as_it_is_compiled() -> None:
    """For processors torch 2.14.1 compiles it to what writes where it must not."""
    assert_flexible("llama", 1, WIDE, "cuda")


def deaf(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **how: Any) -> Any:
    """Causal, whatever a mask says."""
    places = torch.arange(key.shape[2])
    seen = places <= places[-query.shape[2] :, None]
    return sdpa_attention_forward(module, query, key, value, seen[None, None], **how)


@pytest.fixture
def _deaf() -> Iterator[None]:
    AttentionInterface.register("deaf", deaf)
    AttentionMaskInterface.register("deaf", sdpa_mask)
    yield
    del AttentionInterface._global_mapping["deaf"], AttentionMaskInterface._global_mapping["deaf"]


@pytest.mark.usefixtures("_deaf")
def test_a_kernel_that_takes_no_mask_is_refused_by_what_it_does() -> None:
    model = toys.model("llama", layers=3)
    model.set_attn_implementation("deaf")
    ours, expected = drafted(model, toys.inputs("llama"), 4)  # a chain is causal
    assert torch.equal(ours.sequences, expected)
    way_out = r"LlamaForCausalLM scores a tree .*; attention 'deaf' may be why: .*'sdpa'"
    with pytest.raises(ValueError, match=way_out):
        drafted(model, toys.inputs("llama"), WIDE)
