"""A head on text alone: no visual slot in its memory, positions as they were, the target's text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mmspec
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request
from tests import toys
from tests.partners import partner
from tests.toys import Film, readers

ROOM = 12


def begun(request: Any, family: str = "qwen2_5_vl") -> tuple[Any, Context, Any]:
    """The head's draft model, a prompt, and what it remembers of that."""
    model = toys.model(family)
    fast = mmspec.accelerate(model, "sparrow", drafter=partner("sparrow", family))
    draft = fast.session.bound.drafter.model
    noise = KeyedNoise.from_seed(0, len(request["input_ids"]), torch.device("cpu"), None)
    asked = Request(request, Sampling(), noise, ROOM)
    context = CausalTarget(readers.backbone(model), draft.required_features).prefill(asked)
    return draft, context, draft.begin(context)


@pytest.mark.parametrize("shape", [{"length": 4}, {"tree": [2, 2]}], ids=str)
@pytest.mark.parametrize("films", [[Film(), Film(2)], [Film(2), Film(9, 6, 4)]], ids=len)
def test_the_targets_output_is_its_own(films: list[Film], shape: dict[str, Any]) -> None:
    model, request = toys.model("qwen2_5_vl"), toys.with_video("qwen2_5_vl", films=films, batch=2)
    fast = mmspec.accelerate(model, "sparrow", drafter=partner("sparrow", "qwen2_5_vl"), **shape)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.fallback is None
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)


@torch.no_grad()
def test_its_memory_does_not_grow_with_the_clip() -> None:
    kept = []
    for frames in (1, 20):
        request = toys.with_video("qwen2_5_vl", films=[Film(frames)])
        _, context, state = begun(request)
        words = sum(token != toys.VIDEO for token in context.history[0])
        kept.append((state.memory.lengths, state.memory.rope[0]))
        assert state.memory.lengths == [words - 1]
    assert kept[0][0] == kept[1][0]
    assert kept[1][1] - kept[0][1] == 4 * 19  # positions count the clip all the same


@torch.no_grad()
@pytest.mark.parametrize(("recipe", "same"), [("sparrow", True), ("eagle", False)])
def test_states_of_frames_are_not_read(recipe: str, same: bool) -> None:
    """Other states at visual slots, the same draft; but for the first word behind the clip, which
    stands beside the last of them. The head of EAGLE reads them."""
    draft, context, _ = begun(toys.with_video("qwen2_5_vl", batch=2))
    if recipe == "eagle":
        draft = replace(draft, visual_slots=None)
    distributions = []
    for scale in (1.0, -3.0):
        hidden, embeds = (context.shared[name].clone() for name in ("hidden", "embeds"))
        ids = context.request.inputs["input_ids"]
        frames = ids == toys.VIDEO
        last = frames & ~frames.roll(-1, 1)
        hidden[frames & ~last] *= scale
        embeds[frames] *= scale
        other = replace(context, shared={**context.shared, "hidden": hidden, "embeds": embeds})
        history = tuple([*row, 7] for row in context.history)
        state = draft.begin(other)
        distributions.append(draft.predict_first(replace(other, history=history), state).scores)
    assert torch.equal(*distributions) is same


@torch.no_grad()
def test_text_alone_is_eagle() -> None:
    request = toys.inputs("llama", batch=3, ragged=True)
    model, head = toys.model("llama"), partner("sparrow", "llama")
    told = []
    for recipe in ("sparrow", "eagle"):
        fast = mmspec.accelerate(model, recipe, drafter=head, length=4, verifier="coupled")
        out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
        told.append((out.sequences.tolist(), out.stats.per_step_accepted))
    assert told[0] == told[1]
