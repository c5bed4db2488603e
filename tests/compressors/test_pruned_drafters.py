"""Compressors change the drafter's input, but not the target's output."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.compressors import describe
from tests import toys
from tests.compressors.catalogue import PICTURED, image_compressors, neutral, spell_name, usual
from tests.covering import limited
from tests.partners import noisy

torch.set_num_threads(1)

ROOM = 6
BATCHES: dict[str, dict[str, Any]] = {"one": {}, "ragged": {"batch": 3, "ragged": True}}
SHAPES: dict[str, dict[str, Any]] = {"chain": {"length": 3}, "tree": {"tree": [2, 2]}}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}
NO_CLASS_TOKEN = "qwen2_5_vl"


@lru_cache(maxsize=8)
def pair(family: str) -> tuple[Any, Any]:
    return toys.model(family), noisy(family)


@lru_cache(maxsize=16)
def expected_output(family: str, batch: str) -> tuple[Tensor, Tensor]:
    """The target's plain output, greedy and with a seed."""
    model, request = pair(family)[0], toys.inputs(family, **BATCHES[batch])
    greedy = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    drawn = mmspec.decode_plain(model, **request, max_new_tokens=ROOM, **DRAWN).sequences
    return greedy, drawn


FAST = (("llava", "chain", "one"), ("qwen2_5_vl", "tree", "ragged"))  # by turns
COMBINED = [
    (name, *one)
    if one == FAST[at % 2 if name != "cls-topk" else 0]
    else pytest.param(name, *one, marks=pytest.mark.slow)
    for at, name in enumerate(PICTURED)
    for one in product(("llava", "qwen2_5_vl"), SHAPES, BATCHES)
    if name != "cls-topk" or one[0] != NO_CLASS_TOKEN  # refused, see below
]


@pytest.mark.parametrize(("name", "family", "shape", "batch"), COMBINED)
def test_the_targets_output_is_its_own(name: str, family: str, shape: str, batch: str) -> None:
    """Greedy and seeded, for features of the draft model and of the target."""
    model, drafter = pair(family)
    request, right = toys.inputs(family, **BATCHES[batch]), expected_output(family, batch)
    ways = (("pixels", {"do_sample": False}, right[0]), ("target-features", DRAWN, right[1]))
    for sees, settings, text in ways:
        parts: dict[str, Any] = {"compressor": spell_name(name), "sees": sees, **SHAPES[shape]}
        fast = mmspec.accelerate(model, "coupled", drafter=drafter, **parts)
        out = fast.generate(**request, max_new_tokens=ROOM, **settings)
        assert torch.equal(out.sequences, text)
        assert out.stats.fallback is None
        assert out.stats.drafter_saw == sees


@pytest.mark.parametrize("compressor", image_compressors(neutral()), ids=repr)
def test_a_copy_that_sees_all_is_always_right(compressor: Any) -> None:
    model, request = pair("llava")[0], toys.inputs("llava", batch=3, ragged=True)
    parts = {"compressor": compressor, "sees": "pixels", "length": 5}
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model("llava"), **parts)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.target_calls == 1


@pytest.mark.parametrize("compressor", limited(image_compressors(usual()), 10), ids=repr)
def test_rows_with_several_images_one_and_none(compressor: Any) -> None:
    model, drafter = pair("llava")
    request = toys.unequal("llava")
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, compressor=compressor, length=3)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    right = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, right)
    assert out.stats.fallback is None


FILMED = ("qwen2_5_vl", "llava_onevision", "llava_next_video", "video_llava")
CLIPPED = [  # no tower of theirs gives a class token
    (name, family, shape, rows)
    if (family, shape, rows) == (FILMED[at % 4], ("chain", "tree")[at % 2], (1, 3)[at // 2 % 2])
    else pytest.param(name, family, shape, rows, marks=pytest.mark.slow)
    for at, name in enumerate(one for one in PICTURED if one != "cls-topk")
    for family, shape, rows in product(FILMED, SHAPES, (1, 3))
]


@lru_cache(maxsize=8)
def video_request(family: str, rows: int) -> tuple[Any, Tensor, Tensor]:
    """A request about videos, and the target's plain output, greedy and with a seed."""
    model, how = pair(family)[0], {"max_new_tokens": ROOM}
    request = toys.with_video(family, batch=rows)
    greedy = model.generate(**request, **how, do_sample=False)
    return request, greedy, mmspec.decode_plain(model, **request, **how, **DRAWN).sequences


@pytest.mark.parametrize(("name", "family", "shape", "rows"), limited(CLIPPED, 8))
def test_a_pruned_clip_changes_nothing(name: str, family: str, shape: str, rows: int) -> None:
    """Greedy and seeded, for features of the draft model and of the target."""
    model, drafter = pair(family)
    request, greedy, drawn = video_request(family, rows)
    ways = (("pixels", {"do_sample": False}, greedy), ("target-features", DRAWN, drawn))
    for sees, settings, text in ways:
        parts: dict[str, Any] = {"compressor": spell_name(name), "sees": sees, **SHAPES[shape]}
        fast = mmspec.accelerate(model, "coupled", drafter=drafter, **parts)
        out = fast.generate(**request, max_new_tokens=ROOM, **settings)
        assert torch.equal(out.sequences, text)
        assert (out.stats.fallback, out.stats.drafter_saw) == (None, sees)


@pytest.mark.parametrize("sees", ["pixels", "target-features"])
def test_towers_without_a_class_token_are_refused(sees: str) -> None:
    model, drafter = pair("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"vision tower of Qwen2_5_VL.* gives no class token"):
        mmspec.accelerate(model, "coupled", drafter=drafter, compressor="cls-topk", sees=sees)


@pytest.mark.parametrize(
    "name",
    [name for name in PICTURED if any("attention" in need for need in describe(name)["needs"])],
)
def test_attention_that_cannot_be_had_is_refused(name: str) -> None:
    model = toys.model("llava")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="only be tapped from sdpa"):
        mmspec.accelerate(model, "coupled", drafter=pair("llava")[1], compressor=spell_name(name))


def test_a_compressor_of_the_targets_attention_wants_its_prompt() -> None:
    model, drafter = pair("llava")
    request, other = toys.inputs("llava"), toys.inputs("llava", seed=4)
    other["input_ids"][:, -1] = 5
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, compressor="attn-topk")
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False, drafter_inputs=other)
    assert out.stats.fallback is not None
    assert "has another prompt (drafter_inputs=)" in out.stats.fallback
    assert torch.equal(out.sequences, expected_output("llava", "one")[0])


def test_what_goes_by_a_robot_s_past_is_refused_elsewhere() -> None:
    model, drafter = pair("llava")
    with pytest.raises(ValueError, match=r"ActionPrune needs a robot.s earlier images"):
        mmspec.accelerate(model, "coupled", drafter=drafter, compressor="action-prune")
