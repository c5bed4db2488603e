"""A drafter that sees the picture: no better drafter than a copy of the target, none luckier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import mmspec
from tests import toys
from tests.covering import covering, exhaustive, limited

ROOM, LENGTH = 14, 4
FEWEST = 3  # calls: one token comes with the prefill, then five per call


@pytest.mark.parametrize("family", exhaustive(toys.VLMS, (*toys.ONE_EACH, "qwen3_vl", "paligemma")))
def test_a_copy_of_the_target_needs_the_fewest_calls(family: str) -> None:
    model, request = toys.model(family, layers=2), toys.inputs(family)
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model(family, layers=2), length=LENGTH)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.target_calls == FEWEST
    assert out.stats.per_step_accepted[:2] == [LENGTH] * 2
    assert out.stats.drafter_saw == "pixels"
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("family", limited(exhaustive(toys.VLMS, toys.ONE_EACH), 3))
def test_another_picture_costs_acceptance_and_nothing_else(family: str) -> None:
    model, drafter = toys.model(family, layers=3), toys.model(family, layers=3)
    request, how = toys.inputs(family), dict[str, Any](max_new_tokens=16, do_sample=False)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, length=LENGTH)
    seeing = fast.generate(**request, **how)
    other = {"pixel_values": toys.blind(request)["pixel_values"]}
    wrong = fast.generate(**request, **how, drafter_inputs=other)
    assert torch.equal(wrong.sequences, seeing.sequences)
    assert wrong.stats.mean_acceptance_length < seeing.stats.mean_acceptance_length
    assert wrong.stats.target_calls > seeing.stats.target_calls


def test_a_batch_of_copies_needs_no_more() -> None:
    model, request = (
        toys.model("qwen2_5_vl", layers=2),
        toys.inputs("qwen2_5_vl", batch=4, ragged=True),
    )
    fast = mmspec.accelerate(
        model, "coupled", drafter=toys.model("qwen2_5_vl", layers=2), length=LENGTH
    )
    out = fast.generate(**request, max_new_tokens=ROOM, temperature=1.0, seed=1)
    assert out.stats.target_calls == FEWEST


@pytest.mark.parametrize(
    ("sees", "family"),
    limited(
        covering(["nothing", "placeholders"], ["llava", "qwen2_5_vl", "gemma3"], strength=1), 2
    ),
)
def test_a_blind_drafter_is_not_moved_by_the_picture(family: str, sees: str) -> None:
    model, drafter, request = (
        toys.model(family, layers=2),
        toys.model(family, layers=2),
        toys.inputs(family),
    )
    seen: list[Mapping[str, Any]] = []
    drafter.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, length=LENGTH, sees=sees)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    again = fast.generate(
        **request, max_new_tokens=ROOM, do_sample=False, drafter_inputs=toys.blind(request)
    )
    assert out.stats.drafter_saw == again.stats.drafter_saw == sees
    assert out.stats.per_step_accepted == again.stats.per_step_accepted
    assert torch.equal(out.sequences, again.sequences)
    assert seen
    assert all(given.get("pixel_values") is None for given in seen)
    has_marks = any(bool((given["input_ids"] == toys.IMAGE).any()) for given in seen)
    assert has_marks is (sees == "placeholders")
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)


def test_a_text_drafter_is_blind_by_itself() -> None:
    fast = mmspec.accelerate(
        toys.model("llava", layers=2), "coupled", drafter=toys.model("llama", layers=2)
    )
    assert fast.sees == "nothing"
    assert "drafter sees nothing" in repr(fast)
