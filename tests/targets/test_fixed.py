"""Buffers of fixed capacity: padded blocks are placed and masked as `Memory.place` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.draft import Draft, Kind
from mmspec.modalities.common.families import make_reader
from mmspec.targets.fixed import (
    LENGTHS,
    MIN_CAPACITY,
    BlockPlan,
    BufferStore,
    FixedSlots,
    round_length,
    round_power,
    split_layers,
)
from mmspec.targets.memory import TokenBlock, build_block
from mmspec.trees import Tree
from tests import toys

HIDE = torch.finfo(torch.float32).min


@torch.no_grad()
def memory_of(family: str = "llama", **how: Any) -> Any:
    inputs = toys.inputs(family, **how)
    return make_reader(toys.model(family)).prefill(inputs, extra_slots=20)[0]


def plan_of(fixed: FixedSlots, memory: Any, block: TokenBlock) -> tuple[BlockPlan, Tensor]:
    tokens, depths, corner, columns = fixed.place(memory, block)
    return BlockPlan(depths, corner, columns, fixed.base, fixed.offsets), tokens


def blocks() -> list[tuple[list[int], list[list[int]], Tree | None]]:
    """Steps of three rows, the pending tokens of each, and a draft."""
    tree = Tree((-1, -1, 0, 0, 1))
    return [
        ([0, 0, 0], [[5], [6], [7]], None),
        ([0, 0, 0], [[5], [6], [7]], Tree.chain(4)),
        ([3, 3, 3], [[5], [6], [7]], tree),
        ([1, 4, 0], [[5], [6], [7]], Tree.chain(2)),
        ([2, 0, 1], [[5, 6, 7], [6], [7, 8]], tree),
    ]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "mistral-sliding"])
def test_a_plan_places_and_masks_as_the_memory_does(family: str, ragged: bool) -> None:
    memory = memory_of(family, batch=3, ragged=ragged)
    fixed = FixedSlots(memory, BufferStore(), room=40)
    for steps, pending, tree in blocks():
        memory.advance(steps)
        draft = None
        if tree is not None:
            ids = torch.randint(5, 40, (3, len(tree.parents)))
            draft = Draft.from_tree(tree, ids, Kind.DET)
        block = build_block(pending, draft, memory.like)
        plan, tokens = plan_of(fixed, memory, block)
        positions, mask, queries = memory.place(block)
        if memory.axes > 1:
            positions = memory.spread_axes(positions)
        count, view = block.length, mask.shape[-1]
        assert torch.equal(tokens[:3, :count], block.tokens)
        own = plan.positions[..., :3, :count]
        assert torch.equal(own, positions.expand_as(own))
        # left padding is written to other slots, which no token attends to
        real = torch.ones(3, count, dtype=torch.bool)
        for row, pad in enumerate(block.pads or (0, 0, 0)):
            real[row, :pad] = False
        at = plan.slots[:3, :count]
        assert torch.equal(at[real], memory._slots(block)[real])
        assert all(len(set(row.tolist())) == len(row) for row in plan.slots)
        found, expected = plan.mask[:3, 0, :count], mask.expand(3, 1, -1, -1)[:, 0]
        assert torch.equal(found[..., :view][real], expected[real])
        assert bool((found[..., view:][real] == HIDE).all())
        if memory.window is not None:
            window = memory.mask_window(mask, queries).expand(3, 1, -1, -1)[:, 0]
            low = memory.cache.plan.low
            inside = plan.mask_window(memory.window)[:3, 0, :count]
            assert torch.equal(inside[..., low:view][real], window[real])
            assert bool((inside[..., :low][real] == HIDE).all())


def test_a_wrong_position_or_a_missing_pad_is_seen_by_the_comparison() -> None:
    memory = memory_of(batch=3, ragged=True)
    fixed = FixedSlots(memory, BufferStore(), room=40)
    block = build_block([[5, 6], [6], [7]], None, memory.like)
    _, depths, corner, columns = fixed.place(memory, block)
    right = BlockPlan(depths, corner, columns, fixed.base, None)
    for row in range(4):
        wrong = columns.clone()
        wrong[row] += 1
        plan = BlockPlan(depths, corner, wrong, fixed.base, None)
        same = [torch.equal(getattr(plan, n), getattr(right, n)) for n in ("slots", "mask")]
        assert not (all(same) and torch.equal(plan.positions, right.positions))


def test_sizes_come_from_a_small_set() -> None:
    assert {round_length(one) for one in range(1, 129)} == set(LENGTHS)
    assert round_length(129) == 256
    assert [round_power(one, MIN_CAPACITY) for one in (1, 256, 257, 1000)] == [256, 256, 512, 1024]
    assert [round_power(one) for one in (1, 2, 3, 5)] == [1, 2, 4, 8]


def test_layers_of_a_buffer_have_storages_of_their_own() -> None:
    """In the same memory; tensors of one storage torch compares pairwise when it compiles."""
    buffer = torch.zeros(4, 1, 2, 8, 3, dtype=torch.bfloat16)
    parts = split_layers(buffer)
    buffer[2] = 1
    assert [int(part.sum()) for part in parts] == [0, 0, 48, 0]
    parts[3].fill_(2)
    assert int(buffer[3].sum()) == 96
    assert len({part.untyped_storage()._cdata for part in parts}) == 4


def test_a_buffer_is_used_again_and_never_by_two_requests() -> None:
    store = BufferStore()
    first, second = memory_of(), memory_of()
    one, two = (FixedSlots(memory, store, 40) for memory in (first, second))
    own = one.parts[0].data_ptr()
    assert own != two.parts[0].data_ptr()
    one.parts[0].fill_(torch.nan)
    del one, first
    third = memory_of()
    again = FixedSlots(third, store, 40)
    assert again.parts[0].data_ptr() == own
    assert not any(bool(part.isnan().any()) for part in again.parts)


def test_the_prompt_moves_to_a_larger_buffer() -> None:
    memory = memory_of(batch=3, ragged=True)
    fixed = FixedSlots(memory, BufferStore(), room=8)
    slots, before = max(memory.lengths), [part.clone() for part in fixed.parts]
    assert fixed.capacity == MIN_CAPACITY
    assert fixed.rows == 4
    fixed.fit(memory, MIN_CAPACITY + 1)
    assert fixed.capacity == 2 * MIN_CAPACITY
    for old, new in zip(before, fixed.parts, strict=True):
        assert torch.equal(old[:, :, :slots], new[:, :, :slots])
    layer = memory.cache.layers[0]
    assert layer.is_pooled
    assert layer.keys.data_ptr() == fixed.parts[0].data_ptr()


@pytest.mark.parametrize(
    ("family", "reason"), [("lfm2_vl", "keys and values"), ("qwen3_5", "one by one")]
)
def test_memories_of_other_states_are_named(family: str, reason: str) -> None:
    batch = 2 if reason == "one by one" else 1
    found = FixedSlots.find_obstacle(memory_of(family, batch=batch))
    assert found is not None
    assert reason in found
