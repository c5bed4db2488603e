"""Windows whose end is reached while a text is written: asked about before its first token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import mmspec
from mmspec.drafters.oracle import Oracle
from mmspec.models.loading import random_model
from mmspec.targets.cache import windows_of
from mmspec.targets.memory import Memory
from mmspec.targets.readers import check
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering
from tests.toys.texts import prompts

WINDOW, ROOM = 40, 24  # prompts have 24 to 32 tokens
WIDE = Tree.branching([2, 2, 1])
SHAPES: dict[str, tuple[int, Any]] = {"chain": (1, 4), "tree": (1, WIDE), "ragged": (3, 4)}
Request = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    check.clear_cache()
    yield
    check.clear_cache()


def llama4() -> Any:
    """Chunks of attention, and a layer without positions that sees everything."""
    config = hf.Llama4TextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=16,
        max_position_embeddings=128,
    )
    model = random_model(lambda: hf.Llama4ForCausalLM(config), 0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    model.generation_config = hf.GenerationConfig.from_dict(ends)
    return model


def drafted(model: Any, request: Request, shape: Any, room: int = ROOM) -> tuple[Tensor, Tensor]:
    """Our tokens and the model's own."""
    expected = model.generate(**request, max_new_tokens=room, do_sample=False)
    rows = expected[:, request["input_ids"].shape[1] :].tolist()
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle(rows, 0.4, tree=shape, seed=1))
    return fast.generate(**request, max_new_tokens=room, do_sample=False).sequences, expected


@pytest.mark.parametrize(
    ("family", "shape"),
    covering(("mistral-sliding", "gemma3-text", "gemma3"), tuple(SHAPES), strength=1),
)
def test_a_window_is_outgrown_as_generate_does(family: str, shape: str) -> None:
    batch, draft = SHAPES[shape]
    model = toys.model(family, sliding_window=WINDOW)
    request = toys.inputs(family, batch=batch, ragged=batch > 1)
    assert request["input_ids"].shape[1] < WINDOW < request["input_ids"].shape[1] + ROOM
    ours, expected = drafted(model, request, draft)
    assert torch.equal(ours, expected)
    assert len(check._verdicts) == 2


@pytest.mark.parametrize("batch", [1, 3])
def test_a_chunk_is_outgrown_as_generate_does(batch: int) -> None:
    ours, expected = drafted(llama4(), prompts(batch), 4)  # 13 tokens, chunks end at 16 and 32
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("family", "shape"), covering(("mistral-sliding", "gemma3"), tuple(SHAPES), strength=1)
)
def test_a_window_that_is_ignored_is_found_before_it_is_reached(
    family: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, (batch, draft) = Memory.place, SHAPES[shape]

    def without_window(self: Memory, block: Any) -> Any:
        placed = place(self, block)
        self.cache.plan.low = 0
        return placed

    monkeypatch.setattr(Memory, "mask_window", lambda self, mask, queries: mask)
    monkeypatch.setattr(Memory, "place", without_window)
    model = toys.model(family, layers=4, sliding_window=WINDOW)
    request = toys.inputs(family, batch=batch, ragged=batch > 1)
    short = WINDOW - request["input_ids"].shape[1]
    ours, expected = drafted(model, request, draft, short)
    assert torch.equal(ours, expected)
    if draft is WIDE:
        with pytest.raises(ValueError, match=r"scores a .* a window, .* differ; give length="):
            drafted(model, request, draft)
        return
    ours, expected = drafted(model, request, draft)  # read as the model's own steps
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(("room", "count"), [(WINDOW - 24, 1), (WINDOW - 23, 2)])
def test_a_window_out_of_reach_is_not_asked_about(room: int, count: int) -> None:
    model = toys.model("mistral-sliding", sliding_window=WINDOW)
    mmspec.decode_plain(model, **toys.inputs("mistral-sliding"), max_new_tokens=room)
    assert len(check._verdicts) == count


def test_a_prompt_just_behind_a_window_is_asked_further_behind_it() -> None:
    """The window hides a slot or two there, which no score need show."""
    model = toys.model("mistral-sliding", sliding_window=22)
    mmspec.decode_plain(model, **toys.inputs("mistral-sliding"), max_new_tokens=2)
    assert len(check._verdicts) == 2


def test_windows_are_told_by_their_names() -> None:
    assert windows_of(llama4().config) == (16,)
    assert windows_of(toys.model("mistral-sliding").config) == (toys.WINDOW,)
    assert windows_of(hf.Qwen2Config(max_window_layers=28)) == ()
