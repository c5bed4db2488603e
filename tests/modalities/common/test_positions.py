"""`position_ids` given by the user, also inside `generate()`, which makes its own by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from tests import toys
from tests.covering import covering, limited
from tests.partners import noisy

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def spread(request: dict[str, torch.Tensor]) -> torch.Tensor:  # -> (B, L)
    """Places two apart: no model makes such."""
    return 2 * (request["attention_mask"].cumsum(-1) - 1).clamp_min(0)


@pytest.mark.parametrize(
    ("batch", "family"),
    limited(
        covering(
            [{}, {"batch": 2, "ragged": True}],
            ["llama", "llava", "qwen2_5_vl", "qwen3_vl"],
            strength=1,
        ),
        2,
    ),
    ids=str,
)
def test_places_that_are_given_are_kept(family: str, batch: dict[str, Any]) -> None:
    model = toys.model(family)
    request = toys.inputs(family, **batch)
    placed = {**request, "position_ids": spread(request)}
    expected, usual = model.generate(**placed, **GREEDY), model.generate(**request, **GREEDY)
    assert not torch.equal(expected, usual), "places that change nothing show nothing"
    fast = mmspec.accelerate(model, "coupled", drafter=noisy(family))
    assert torch.equal(fast.generate(**placed, **GREEDY).sequences, expected)
    assert torch.equal(model.generate(**placed, **GREEDY, custom_generate=fast), expected)
    assert torch.equal(model.generate(**request, **GREEDY, custom_generate=fast), usual)


def test_text_places_of_a_prompt_with_a_picture_are_kept() -> None:
    """What `generate()` makes for M-RoPE before it has seen the picture, but told by the user."""
    model = toys.model("qwen2_5_vl")
    request = toys.inputs("qwen2_5_vl")
    placed = {**request, "position_ids": request["attention_mask"].cumsum(-1) - 1}
    expected = model.generate(**placed, **GREEDY)
    assert not torch.equal(expected, model.generate(**request, **GREEDY))
    fast = mmspec.accelerate(model, "prompt-lookup")
    assert torch.equal(model.generate(**placed, **GREEDY, custom_generate=fast), expected)


def test_an_empty_prompt_is_refused_inside_generate_too() -> None:
    model = toys.model("llama")
    fast = mmspec.accelerate(model, "prompt-lookup")
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(torch.empty(1, 0, dtype=torch.int64), **GREEDY, custom_generate=fast)
