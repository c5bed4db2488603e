"""Prompts of embeddings: new tokens as `generate()` gives them, and drafters that can read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.drafters.oracle import Oracle
from mmspec.modalities.vlm import survey
from tests import toys
from tests.covering import limited
from tests.partners import noisy

ROOM = 9
BATCHES: dict[str, dict[str, Any]] = {"one": {}, "ragged": {"batch": 2, "ragged": True}}
GREEDY: dict[str, Any] = {"max_new_tokens": ROOM, "do_sample": False}
Request = dict[str, Any]


def embedded(model: Any, family: str, **batch: Any) -> tuple[Request, Tensor]:
    """A prompt as embeddings, and the ids it was made of."""
    request = toys.inputs(family, **batch)
    ids = request["input_ids"].masked_fill(request["input_ids"] > 139, 7)  # no picture
    made = {"inputs_embeds": model.get_input_embeddings()(ids)}
    return {**made, "attention_mask": request["attention_mask"]}, ids


@pytest.mark.parametrize("batch", [pytest.param("one", marks=pytest.mark.slow), "ragged"])
@pytest.mark.parametrize(
    "family", limited(["llama", "gemma3-text", "lfm2", "llava", "qwen2_5_vl"], 3)
)
def test_embeddings_are_read_as_generate_reads_them(family: str, batch: str) -> None:
    """With a penalty and a least length, which see new tokens only."""
    model = toys.model(family)
    request, _ = embedded(model, family, **BATCHES[batch])
    settings = {**GREEDY, "repetition_penalty": 1.3, "min_new_tokens": 4}
    expected = model.generate(**request, **settings)
    assert expected.shape[1] == ROOM
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle(expected.tolist(), 0.5, tree=3))
    out = fast.generate(**request, **settings)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None
    assert torch.equal(model.generate(**request, **settings, custom_generate=fast), expected)
    lookup = mmspec.accelerate(model, "prompt-lookup")
    assert torch.equal(lookup.generate(**request, **settings).sequences, expected)


def test_a_length_counts_embeddings_as_generate_counts_them() -> None:
    model = toys.model("llama")
    request, ids = embedded(model, "llama")
    fast = mmspec.accelerate(model, "prompt-lookup")
    for length in ({}, {"max_length": ids.shape[1] + 5}):
        expected = model.generate(**request, **length, do_sample=False)
        assert torch.equal(fast.generate(**request, **length).sequences, expected)


def test_ids_beside_embeddings_are_what_is_handed_back() -> None:
    model = toys.model("llama")
    request, ids = embedded(model, "llama", batch=2, ragged=True)
    both = {**request, "input_ids": ids}
    expected = model.generate(**both, **GREEDY)
    fast = mmspec.accelerate(model, "coupled", drafter=noisy("llama"))
    out = fast.generate(**both, **GREEDY)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None
    assert torch.equal(model.generate(**both, **GREEDY, custom_generate=fast), expected)


def test_a_draft_model_needs_token_ids() -> None:
    model = toys.model("llama")
    request, ids = embedded(model, "llama", batch=2, ragged=True)
    expected = model.generate(**request, **GREEDY)
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model("llama"), length=3)
    with pytest.raises(ValueError, match=r"inputs_embeds has no tokens.*give drafter_inputs"):
        fast.generate(**request, **GREEDY)
    with pytest.raises(ValueError, match=r"inputs_embeds has no tokens.*give drafter_inputs"):
        model.generate(**request, **GREEDY, custom_generate=fast)
    words = {"input_ids": ids, "attention_mask": request["attention_mask"]}
    out = fast.generate(**request, **GREEDY, drafter_inputs=words)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None
    assert out.stats.draft_acceptance_rate == 1
    inside = model.generate(**request, **GREEDY, custom_generate=fast, drafter_inputs=words)
    assert torch.equal(inside, expected)


def test_a_seed_reproduces_a_prompt_of_embeddings() -> None:
    model = toys.model("llama")
    request, _ = embedded(model, "llama", batch=2)
    settings: dict[str, Any] = {"max_new_tokens": ROOM, "temperature": 0.9, "seed": 4}
    plain = mmspec.decode_plain(model, **request, **settings).sequences
    fast = mmspec.accelerate(model, "prompt-lookup")
    for _ in range(2):
        assert torch.equal(fast.generate(**request, **settings).sequences, plain)


def test_embeddings_of_another_length_than_the_ids_are_refused() -> None:
    model = toys.model("llama")
    request, ids = embedded(model, "llama")
    fast, short = mmspec.accelerate(model, "prompt-lookup"), ids[:, 1:]
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 24\), but the prompt"):
        fast.generate(**request, input_ids=short, **GREEDY)
    del request["attention_mask"]
    with pytest.raises(ValueError, match=r"input_ids are .* and inputs_embeds .*same tokens"):
        fast.generate(**request, input_ids=short, **GREEDY)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_recurrent_model_continues_embeddings_inside_generate(batch: int) -> None:
    """Mamba calls its cache `cache_params`."""
    model = survey.build("Mamba2ForCausalLM")
    model.generation_config.eos_token_id = None
    ids = torch.randint(5, 90, (batch, 6), generator=torch.Generator().manual_seed(0))
    request: dict[str, Any] = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**request, **how)
    for recipe in ("plain", "prompt-lookup"):
        fast = mmspec.accelerate(model, recipe)
        assert torch.equal(model.generate(**request, **how, custom_generate=fast), expected)
        assert torch.equal(fast.generate(**request, **how).sequences, expected)
