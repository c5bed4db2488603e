"""Initialization of decoder layers refuses unsupported layers and leaves them unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from tools.zoo.initialization import mimetic_init


def test_heads_that_share_keys_are_refused_and_left_as_they_were() -> None:
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 8,
    }
    model = LlamaModel(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="as many key heads as query heads"):
        mimetic_init(model.layers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
