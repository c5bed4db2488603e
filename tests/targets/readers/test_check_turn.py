"""A later turn on a used cache is compared with the model's own reading of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import mmspec
from mmspec import _hf
from mmspec.modalities.vlm import survey
from tests import toys

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def ids(length: int, seed: int = 0) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(5, 60, (1, length), generator=noise)


def test_a_class_that_masks_a_turn_without_its_window_is_refused() -> None:
    """Moshi reads one token after a rolled cache with its window, and several without it."""
    model = survey.build("MoshiForCausalLM")
    model.generation_config.eos_token_id = None
    fast = mmspec.accelerate(model, "prompt-lookup")
    cache = hf.DynamicCache(config=model.config)
    first = fast.generate(ids(20), **GREEDY, past_key_values=cache).sequences
    assert torch.equal(first, model.generate(ids(20), **GREEDY))
    whole = torch.cat((first, ids(7, seed=1)), 1)
    with pytest.raises(ValueError, match=r"MoshiForCausalLM scores a new turn.*drop past_key"):
        fast.generate(whole, **GREEDY, past_key_values=cache)
    assert torch.equal(fast.generate(whole, **GREEDY).sequences, model.generate(whole, **GREEDY))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_turn_is_compared_once_per_shape(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.targets.readers.check_turn._agreed", set())
    prepared: list[bool] = []
    prepare = _hf.prepare_prefill_inputs

    def noted(model: Any, inputs: Any, cache: Any, *rest: Any) -> Any:
        prepared.append(isinstance(cache, hf.DynamicCache))
        return prepare(model, inputs, cache, *rest)

    monkeypatch.setattr(_hf, "prepare_prefill_inputs", noted)
    model = toys.model(family, layers=3)
    fast, counts = mmspec.accelerate(model, "prompt-lookup"), list[int]()
    for _ in range(2):
        theirs, ours = (hf.DynamicCache(config=model.config) for _ in range(2))
        first = model.generate(ids(9), **GREEDY, past_key_values=theirs)
        fast.generate(ids(9), **GREEDY, past_key_values=ours)
        whole = torch.cat((first, ids(3, seed=1)), 1)
        expected = model.generate(whole, **GREEDY, past_key_values=theirs)
        prepared.clear()
        assert torch.equal(fast.generate(whole, **GREEDY, past_key_values=ours).sequences, expected)
        counts.append(sum(prepared))
    assert counts == [1, 0]
