"""Rotary positions behind pictures and videos go on as in `generate()`, on every axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.targets.readers.rotary import PositionTable, RopeBorder, next_rope_positions
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering, limited
from tests.partners import noisy, partner

ROOM = 9
HYBRID = ("lfm2_vl", "qwen3_5")
Request = dict[str, Tensor]


def check(family: str, request: Request) -> None:
    """Greedy tokens of a chain and, where there are branches, of a tree."""
    model, drafter = toys.model(family, layers=2), noisy(family, layers=2)
    settings: dict[str, Any] = {"max_new_tokens": ROOM, "do_sample": False}
    expected = model.generate(**request, **settings)
    shapes: list[dict[str, Any]] = [{"length": 3}]
    if family not in HYBRID:
        shapes.append({"tree": Tree.branching([2, 2, 1])})
    for shape in shapes:
        out = mmspec.accelerate(model, "coupled", drafter=drafter, **shape).generate(
            **request, **settings
        )
        assert torch.equal(out.sequences, expected)
        assert out.stats.fallback is None


def ending_on_a_picture(family: str, batch: int, ragged: bool = False) -> Request:
    """The words behind the last placeholder are cut off; rows stay padded on the left."""
    request = toys.inputs(family, batch=batch, ragged=ragged)
    widths = request["input_ids"].shape
    cut = [int((row == toys.IMAGE).nonzero()[-1]) + 1 for row in request["input_ids"]]
    longest = max(int(request["attention_mask"][row, :end].sum()) for row, end in enumerate(cut))
    for name, value in request.items():
        if value.shape == widths:
            rows = []
            for row, end in enumerate(cut):
                kept = value[row, max(end - longest, 0) : end]
                rows.append(torch.cat((kept.new_zeros(longest - len(kept)), kept)))
            request[name] = torch.stack(rows)
    assert bool((request["input_ids"][:, -1] == toys.IMAGE).all())
    return request


@pytest.mark.parametrize(("family", "batch"), limited(covering(toys.CLIPS, (1, 2), strength=1), 4))
def test_a_video(family: str, batch: int) -> None:
    """At three seconds a frame the last one stands far behind the text that follows it."""
    check(family, toys.with_video(family, batch=batch))


@pytest.mark.parametrize("family", limited(toys.CLIPS, 4))
def test_a_prompt_that_ends_on_a_video(family: str) -> None:
    request = toys.with_video(family, tail=0)
    end = int((request["input_ids"][0] == toys.VIDEO).nonzero()[-1]) + 1
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if name in request:
            request[name] = request[name][:, :end]
    check(family, request)


BATCHES: list[dict[str, Any]] = [{"batch": 3, "ragged": True}, {"batch": 2}, {"batch": 1}]


@pytest.mark.parametrize(("family", "batch"), limited(covering(toys.VLMS, BATCHES, strength=1), 6))
def test_a_prompt_that_ends_on_a_picture(family: str, batch: dict[str, Any]) -> None:
    check(family, ending_on_a_picture(family, **batch))


@pytest.mark.parametrize("recipe", ["ibed", "prompt-lookup", "swift", "eagle"])
def test_views_and_borrowed_memories_stand_there_too(recipe: str) -> None:
    """A drafter that is right by construction is accepted only where its positions are right."""
    model, request = toys.model("qwen2_5_vl", layers=3), ending_on_a_picture("qwen2_5_vl", 2)
    settings: dict[str, Any] = {"max_new_tokens": ROOM, "do_sample": False}
    expected = model.generate(**request, **settings)
    own: dict[str, Any] = {"views": ["pixels", "nothing"]} if recipe == "ibed" else {}
    fast = mmspec.accelerate(model, recipe, drafter=partner(recipe, "qwen2_5_vl", 3), **own)
    assert torch.equal(fast.generate(**request, **settings).sequences, expected)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_copy_stands_where_the_target_does(batch: int) -> None:
    request = ending_on_a_picture("qwen2_5_vl", batch)
    model = toys.model("qwen2_5_vl", layers=2)
    fast = mmspec.accelerate(model, "ibed", drafter=model, views=["pixels", "pixels"], length=4)
    out = fast.generate(**request, max_new_tokens=21, do_sample=False)
    assert out.stats.target_calls == 4


def test_every_axis_goes_on_from_the_last_column() -> None:
    positions = torch.tensor([[0, 1, 2, 3], [0, 5, 9, 2], [0, 1, 1, 4], [0, 1, 2, 5]])[:, None]
    rope, offsets, _ = next_rope_positions(positions, 1, 4)
    assert rope == [3]
    assert offsets is not None
    assert offsets.flatten().tolist() == [0, 2, 3]
    rope, offsets, _ = next_rope_positions(positions[:, :, :1].expand(-1, 2, -1), 2, 1)
    assert (rope, offsets) == ([1, 1], None)
    assert next_rope_positions(torch.tensor([[0, 0, 1], [0, 1, 2]]), 2, 3) == ([2, 3], None, 1)
    assert next_rope_positions(None, 2, 3) == ([3, 3], None, 0)


def test_the_last_token_may_stand_on_the_border() -> None:
    """It is not read any more, so nothing turns."""
    border = RopeBorder("longrope", 10)
    border.check(5, 6)
    with pytest.raises(ValueError, match="give at most 6"):
        border.check(5, 7)


def test_rows_of_tables_are_looked_up_joined_and_taken() -> None:
    def build(first: int, *columns: list[int]) -> PositionTable:
        return PositionTable(torch.tensor(columns).T[:, None], torch.tensor([[first]]))

    long, short = build(7, [7, 7], [7, 8], [9, 9]), build(4, [4, 5], [6, 6])
    both = PositionTable.concatenate((long, short))
    found = both.look_up(torch.tensor([[8, 9, 12], [4, 5, 6]]))
    assert found.tolist() == [[[7, 9, 9], [4, 6, 6]], [[8, 9, 9], [5, 6, 6]]]
    assert both.select([1]).look_up(torch.tensor([[5]])).tolist() == [[[6]], [[6]]]
    assert long.look_up(torch.tensor([[7]])).tolist() == [[[7]], [[7]]]
