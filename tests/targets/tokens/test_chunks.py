"""A prompt that is read in chunks gives the context of one that is read as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.decode import Running
from mmspec.targets.tokens.chunks import ChunkedPrompt
from tests import toys
from tests.serving.test_engine import accelerated

SIZE, TAIL = 7, 20


def lengthen(inputs: Any, count: int = TAIL) -> dict[str, Any]:
    """A request with further words."""
    length = inputs["input_ids"].shape[1]
    words = torch.randint(20, 60, (1, count), generator=torch.Generator().manual_seed(1))
    fill = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    return {
        name: torch.cat((value, fill.get(name, torch.zeros_like(words)).to(value)), 1)
        if value.shape[1:] == (length,)
        else value
        for name, value in inputs.items()
    }


def read_whole(call: Any) -> Any:
    return call.parts.target.prefill(call.request)


def read_chunks(call: Any) -> tuple[Any, int]:
    chunked = ChunkedPrompt(call.parts.target, call.request, SIZE)
    context, count = None, 0
    while context is None:
        context, count = chunked.step(), count + 1
    return context, count


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("mistral-sliding", "coupled"),
        ("llava", "kangaroo"),
        ("qwen2_5_vl", "eagle-3"),
        ("gemma3", "coupled"),
        pytest.param("idefics3", "coupled", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_vl", "eagle-3", marks=pytest.mark.exhaustive),
        pytest.param("llava", "dflash", marks=pytest.mark.exhaustive),
    ],
)
@torch.no_grad()
def test_chunks_give_the_context_of_a_whole_prompt(family: str, recipe: str) -> None:
    """Scores and recorded states, and then the tokens, with greedy decoding and sampled."""
    fast, inputs = accelerated(family, recipe), lengthen(toys.inputs(family))
    for settings in ({"do_sample": False}, {"temperature": 1.0, "seed": 3}):
        call = fast.session.plan({**inputs, **settings, "max_new_tokens": 10}).call
        assert ChunkedPrompt.find_obstacle(call.parts.target, call.request, SIZE) is None
        whole, (context, count) = read_whole(call), read_chunks(call)
        assert count > 2
        torch.testing.assert_close(
            context.scores.distribution.scores, whole.scores.distribution.scores, atol=2e-4, rtol=0
        )
        for name, states in whole.shared.items():
            own: Any = context.shared[name]
            if isinstance(states, Tensor):  # of four axes of positions, the first is text order
                axes = slice(-len(own), None) if name == "positions" else slice(None)
                torch.testing.assert_close(own, states[axes].to(own), atol=2e-3, rtol=1e-3)
        expected = fast.generate(**inputs, **settings, max_new_tokens=10).sequences[0, -10:]
        running, tokens = Running(call.parts, call.request, context), list[int]()
        while not all(running.context.finished):
            tokens += running.step().tokens[0]
        assert tokens == expected.tolist()


@torch.no_grad()
def test_a_chunk_at_other_positions_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: blocks whose rotary positions begin one too late."""
    fast = accelerated("llama", "coupled")
    call = fast.session.plan({**lengthen(toys.inputs("llama")), "max_new_tokens": 4}).call
    reader = type(call.parts.target.backbone)
    read = reader.read_eager

    def shift(self: Any, memory: Any, block: Any, hidden: bool = False) -> Any:
        block.depths.add_(1)
        return read(self, memory, block, hidden)

    whole = read_whole(call)
    monkeypatch.setattr(reader, "read_eager", shift)
    context, _ = read_chunks(call)
    gap = context.scores.distribution.scores - whole.scores.distribution.scores
    assert gap.abs().max() > 0.01


@pytest.mark.parametrize(
    ("family", "recipe", "reason"),
    [
        ("lfm2", "coupled", "row by row"),
        ("llava", "coupled", "attention_mask hides"),
    ],
)
def test_what_is_read_as_a_whole_says_why(family: str, recipe: str, reason: str) -> None:
    inputs = lengthen(toys.inputs(family))
    inputs["attention_mask"][0, -3] = 0
    with torch.no_grad():
        call = accelerated(family, recipe).session.plan({**inputs, "max_new_tokens": 4}).call
    found = ChunkedPrompt.find_obstacle(call.parts.target, call.request, SIZE)
    assert found is not None
    assert reason in found
