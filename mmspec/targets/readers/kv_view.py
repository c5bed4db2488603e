"""A subset of a target's keys and values, for a drafter that runs the target's own layers.

A view holds selected slots of the prompt, which may differ between layers and heads, followed by
the generated tokens. Keys are already rotated, so tokens keep their positions.

    target   slot  0  1 [2  3  4  5] 6  7 | 8  9        prompt | generated
    layer 0        0  1     3        6  7   8  9        each slot of a view is read at its own
    layer 1        0  1           5  6  7   8  9        position, and written at the next free one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory
from mmspec.targets.rows import CannotJoin, drop_row, join_slotted, swap_out
from mmspec.targets.slots import SlotLayer


@dataclass(eq=False)
class KvView:
    """A smaller copy of the target's memory, updated by `sync`."""

    memory: Memory
    num_copied: list[int]  # slots of the target's memory that were copied, without padding, per row
    drafts: int = 0  # number of drafts made with it

    def replace_with(self, other: KvView) -> None:
        """Take over the contents of a newer view."""
        self.memory, self.num_copied, self.drafts = other.memory, other.num_copied, other.drafts

    def sync(self, dense: Memory) -> Memory:
        """Copy the slots committed since the last call. O(new tokens)."""
        used = _count_used(dense)
        counts = [kept - copied for kept, copied in zip(used, self.num_copied, strict=True)]
        if any(counts):
            source = _last_slots(dense.lengths, counts)
            target = _last_slots(_after(self.memory, counts), counts)
            self._copy(dense.cache, source, target)
            self.memory.advance(counts)
            self.num_copied = used
        return self.memory

    def join(self, other: KvView | None) -> None:
        """Append the rows of another request. Raises CannotJoin for one without a view."""
        if other is None:
            raise CannotJoin("one of these requests drafts on a smaller copy, the other does not")
        self.memory = join_slotted(self.memory, other.memory)
        self.num_copied += other.num_copied

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        drop_row(self.memory, row)
        swap_out(self.num_copied, row)

    def _copy(self, dense: SlotCache, source: list[list[int]], target: list[list[int]]) -> None:
        cache = self.memory.cache
        cache.reserve(1 + max(max(row) for row in target))
        device = self.memory.mask.device
        read, write = (torch.tensor(slots, device=device) for slots in (source, target))
        rows = torch.arange(len(read), device=device)[:, None]
        for mine, theirs in zip(cache.layers, dense.layers, strict=True):
            if mine.is_initialized:
                mine.grow()
                for name in mine.buffer_names():
                    getattr(mine, name)[rows, :, write] = getattr(theirs, name)[rows, :, read]


def gather_view(
    dense: Memory,
    config: Any,
    slots: Mapping[int, Sequence[Tensor]],
    room: int,
) -> KvView:
    """Make a view of the target's memory.

    `slots` holds one tensor per row for each layer that the drafter runs: (1 or G, n) ascending
    slots, the same number for all layers of a row and including its last slot. Rows with fewer are
    padded on the left.
    """
    counts = [own.shape[1] for own in next(iter(slots.values()))]
    width = max(counts)
    cache = SlotCache(config, width + room)
    for index, rows in slots.items():
        source, layer = dense.cache.layers[index], cache.layers[index]
        chosen = torch.stack([_pad_slots(own, width, source.keys.shape[1]) for own in rows])
        for name in source.buffer_names():  # an indexer has one head and uses the first row
            theirs = getattr(source, name)
            where = chosen[:, : theirs.shape[1], :, None].expand(-1, -1, -1, theirs.shape[-1])
            layer.allocate(**{name: theirs})
            getattr(layer, name)[:, :, :width] = theirs.gather(2, where)
    for mine, theirs in zip(cache.layers, dense.cache.layers, strict=True):
        if isinstance(theirs, SlotLayer) and theirs.is_cross_attention:
            mine.copy_rows(theirs, slice(None))  # cross-attention to images has no slots
    pads = [width - count for count in counts]
    memory = Memory(cache, width, pads, dense.rope, dense.like, dense.window, dense.is_maskless)
    memory.offsets, memory.axes, memory.max_position = dense.offsets, dense.axes, dense.max_position
    memory.table, memory.step_inputs = dense.table, dense.step_inputs
    return KvView(memory, _count_used(dense))


def _count_used(dense: Memory) -> list[int]:
    """Slots in use per row, without padding, which joined rows lose."""
    return [length - pad for length, pad in zip(dense.lengths, dense.padding, strict=True)]


def _pad_slots(slots: Tensor, width: int, heads: int) -> Tensor:  # (1 or G, n) -> (G, width)
    """The slots of all heads, padded on the left with the first one."""
    before = slots[:, :1].expand(-1, width - slots.shape[1])
    return torch.cat((before, slots), 1).expand(heads, -1)


def _after(memory: Memory, counts: Sequence[int]) -> list[int]:
    return [kept + new for kept, new in zip(memory.lengths, counts, strict=True)]


def _last_slots(stops: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """The last `counts[b]` slots before `stops[b]` per row; short rows repeat their last one."""
    width = max(counts)
    return [
        [*range(stop - new, stop), *[stop - 1] * (width - new)]
        for stop, new in zip(stops, counts, strict=True)
    ]
