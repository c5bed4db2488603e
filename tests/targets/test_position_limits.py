"""Where positions end: tables of learned positions, and rotary frequencies that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmspec
from mmspec.drafters.oracle import Oracle
from mmspec.models.loading import random_model
from mmspec.targets.cache import last_position_of
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering
from tests.toys.texts import prompts, text

ROOM, PROMPT = 12, 13  # of `prompts`
FULL = PROMPT + ROOM - 1  # the last token is not read any more
WIDE = Tree.branching([2, 2, 1, 1, 1])
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "long_factor": [9.0, 5.0, 3.0, 2.0],
}
LONGROPE: dict[str, Any] = {"rope_parameters": {**LONG, "short_factor": [1.0, 1.1, 1.2, 1.3]}}
DYNAMIC: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
}
TABLES = {"gpt2": "n_positions", "gptj": "n_positions", "opt": "max_position_embeddings"}


def phi(border: int) -> Any:
    """Phi-3 with short positions up to `border` tokens."""
    rope = {**LONGROPE["rope_parameters"], "original_max_position_embeddings": border}
    return text("phi3", rope_parameters=rope, original_max_position_embeddings=border)


def check(model: Any, request: dict[str, Tensor], shape: Any, corruption: float = 0.3) -> None:
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    rows = expected[:, request["input_ids"].shape[1] :].tolist()
    drafter = Oracle(rows, corruption, tree=shape)
    out = mmspec.accelerate(model, "coupled", drafter=drafter).generate(
        **request, max_new_tokens=ROOM, do_sample=False
    )
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None


@pytest.mark.parametrize(
    ("batch", "shape", "name"), covering([1, 3], [5, WIDE], TABLES, strength=1), ids=str
)
def test_a_request_may_use_a_table_up_to_its_last_row(name: str, shape: Any, batch: int) -> None:
    """Rows that are done, or nearly, read on beside those that have room."""
    model = text(name, **{TABLES[name]: FULL})
    for corruption in (0.0, 0.5):
        check(model, prompts(batch), shape, corruption)


@pytest.mark.parametrize("recipe", ["token-recycling", "prompt-lookup"])
def test_drafters_keep_to_the_table_too(recipe: str) -> None:
    model, request = text("gpt2", n_positions=FULL), prompts(1)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    fast = mmspec.accelerate(model, recipe)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None


@pytest.mark.parametrize("shape", [5, WIDE], ids=["chain", "tree"])
def test_the_table_of_a_decoder_behind_an_encoder(shape: Any) -> None:
    model, request = (
        toys.model("whisper", max_target_positions=ROOM + 1),
        toys.inputs("whisper", batch=3),
    )
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    drafter = Oracle(expected[:, -ROOM:].tolist(), 0.5, tree=shape)
    out = mmspec.accelerate(model, "coupled", drafter=drafter).generate(
        **request, max_new_tokens=ROOM, do_sample=False
    )
    assert torch.equal(out.sequences[:, -ROOM:], expected[:, -ROOM:])


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decoder_that_counts_positions_itself_is_not_read_beyond_them(batch: int) -> None:
    """Whisper's decoder alone counts slots, of a row that is done too."""
    sizes: dict[str, Any] = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2}
    heads: dict[str, Any] = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = transformers.WhisperConfig(
        **{**sizes, **heads, **ids, "vocab_size": 160, "max_target_positions": FULL},
        is_encoder_decoder=False,
    )
    model = random_model(lambda: transformers.WhisperForCausalLM(config), 0)
    for corruption in (0.0, 0.3, 0.7):
        check(model, prompts(batch), 5, corruption)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [5, WIDE], ids=["chain", "tree"])
@pytest.mark.parametrize("border", [FULL, 5])
def test_longrope_on_either_side_of_its_border(border: int, shape: Any, batch: int) -> None:
    check(phi(border), prompts(batch), shape)


@pytest.mark.parametrize("border", [PROMPT, FULL - 1])
def test_longrope_is_refused_across_its_border(border: int) -> None:
    fast = mmspec.accelerate(phi(border), "plain")
    with pytest.raises(ValueError, match=rf"'longrope'.* {border} tokens.*at most {border - 12}"):
        fast.generate(**prompts(1), max_new_tokens=ROOM)
    most = border - PROMPT + 1
    assert fast.generate(**prompts(1), max_new_tokens=most).sequences.shape[1] == border + 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [5, WIDE], ids=["chain", "tree"])
def test_dynamic_positions_before_their_border(shape: Any, batch: int) -> None:
    check(text("arcee", max_position_embeddings=FULL, **DYNAMIC), prompts(batch), shape)


@pytest.mark.parametrize("border", [5, PROMPT, FULL - 1])
def test_dynamic_positions_are_refused_behind_it(border: int) -> None:
    model = text("arcee", max_position_embeddings=border, **DYNAMIC)
    with pytest.raises(ValueError, match=rf"'dynamic' positions change.* {border}"):
        mmspec.accelerate(model, "plain").generate(**prompts(1), max_new_tokens=ROOM)


def test_a_size_of_minus_one_is_no_limit() -> None:
    """XLNet counts relative positions, and says so."""
    assert last_position_of(transformers.XLNetConfig()) is None
    assert last_position_of(transformers.GPT2Config(n_positions=32)) == 31
