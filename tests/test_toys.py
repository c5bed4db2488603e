"""The toys are fit to be oracles: varied, image-dependent, padding-proof, without special ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import toys
from tests.covering import exhaustive

STEPS = 8
HYBRID = ("gemma3-text", "gemma3", "qwen3_5", "lfm2", "lfm2_vl")


def greedy(toy: Any, request: dict[str, Tensor]) -> Tensor:  # -> (B, STEPS)
    """The generated tokens only; Whisper's `generate` already leaves its prompt out."""
    prompt = request["input_ids"].shape[1] if "input_ids" in request else 0
    tokens: Tensor = toy.generate(**request, max_new_tokens=STEPS, do_sample=False)
    return tokens[:, prompt:]


@pytest.mark.parametrize("family", exhaustive(toys.FAMILIES, toys.ONE_EACH))
def test_ragged_rows_equal_their_requests_alone_and_vary(family: str) -> None:
    toy = toys.model(family)
    request = toys.inputs(family, batch=3, ragged=True)
    tokens = greedy(toy, request)
    assert tokens.shape == (3, STEPS)
    for row in range(3):
        assert torch.equal(greedy(toy, toys.alone(request, row))[0], tokens[row])
    assert sum(len(set(row)) for row in tokens.tolist()) / 3 > 4


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_a_uniform_batch_needs_no_padding(family: str) -> None:
    request = toys.inputs(family, batch=2)
    assert bool(request.get("attention_mask", torch.ones(1)).all())


@pytest.mark.parametrize("family", exhaustive([*toys.VLMS, "whisper"], toys.ONE_EACH))
def test_another_image_gives_other_tokens(family: str) -> None:
    toy, request = toys.model(family), toys.inputs(family)
    assert not torch.equal(greedy(toy, request), greedy(toy, toys.blind(request)))


@pytest.mark.parametrize("family", exhaustive(toys.FAMILIES, toys.ONE_EACH))
def test_seeds_fix_weights_and_requests(family: str) -> None:
    first, again, other = (toys.model(family, seed=seed, layers=2) for seed in (1, 1, 2))
    pairs = zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    head = first.get_output_embeddings().weight
    assert not torch.equal(head, other.get_output_embeddings().weight)
    assert head.data_ptr() != first.get_input_embeddings().weight.data_ptr()
    left, right = toys.inputs(family, seed=1), toys.inputs(family, seed=1)
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("family", exhaustive(toys.FAMILIES, toys.ONE_EACH))
def test_sampling_hot_never_emits_a_special_id(family: str) -> None:
    torch.manual_seed(0)
    toy, request = toys.model(family, layers=1), toys.inputs(family, batch=2)
    kwargs = {"do_sample": True, "temperature": 5.0, "top_k": 0}
    tokens = toy.generate(**request, **kwargs, max_new_tokens=8)[:, -8:]
    assert set(tokens.flatten().tolist()) <= set(toys.WORDS)


@pytest.mark.parametrize("family", HYBRID)
def test_hybrids_mix_full_attention_with_something_else(family: str) -> None:
    kinds = toys.model(family).config.get_text_config().layer_types
    assert "full_attention" in kinds
    assert len(set(kinds)) == 2


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3-text", "gemma3"])
def test_prompts_outgrow_the_sliding_window(family: str) -> None:
    request = toys.inputs(family)
    narrow, wide = (toys.model(family, sliding_window=size) for size in (toys.WINDOW, 512))
    assert narrow.config.get_text_config().sliding_window < request["input_ids"].shape[1]
    assert not torch.equal(greedy(narrow, request), greedy(wide, request))
