"""Part of a target's keys and values, gathered for a drafter that runs the target's own layers.

A view holds chosen slots of the prompt, which may differ between layers and heads, and behind them
what was generated since. Keys are rotated already, so tokens stay at their positions however few
slots are left.

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
from mmspec.targets.slots import SlotLayer


@dataclass(eq=False)
class KvView:
    """A smaller memory beside the target's, brought up to date by `follow`."""

    memory: Memory
    seen: list[int]  # slots of the target's memory that were looked at, per row
    drafts: int = 0  # that were made on it

    def become(self, other: KvView) -> None:
        """Hold from now on what a newer view holds."""
        self.memory, self.seen, self.drafts = other.memory, other.seen, other.drafts

    def follow(self, dense: Memory) -> Memory:
        """Copy what the target has kept since; nothing else is moved. O(new tokens)."""
        news = [kept - seen for kept, seen in zip(dense.kept, self.seen, strict=True)]
        if any(news):
            source, target = _copied(dense.kept, news), _copied(_after(self.memory, news), news)
            self._copy(dense.cache, source, target)
            self.memory.advance(news)
            self.seen = list(dense.kept)
        return self.memory

    def _copy(self, dense: SlotCache, source: list[list[int]], target: list[list[int]]) -> None:
        cache = self.memory.cache
        cache.reserve(1 + max(max(row) for row in target))
        device = self.memory.mask.device
        read, write = (torch.tensor(slots, device=device) for slots in (source, target))
        rows = torch.arange(len(read), device=device)[:, None]
        for mine, theirs in zip(cache.layers, dense.layers, strict=True):
            if mine.is_initialized:
                mine.grow()
                for name in mine.written():
                    getattr(mine, name)[rows, :, write] = getattr(theirs, name)[rows, :, read]


def gathered(
    dense: Memory,
    config: Any,
    slots: Mapping[int, Sequence[Tensor]],
    room: int,
) -> KvView:
    """A view of the target's memory as it stands.

    `slots` are, per layer that the drafter runs, one tensor per row: (1 or G, n) ascending slots,
    as many for all layers of a row; the last slot of the row is among them. Rows with fewer are
    padded on the left.
    """
    counts = [own.shape[1] for own in next(iter(slots.values()))]
    width = max(counts)
    cache = SlotCache(config, width + room)
    for index, rows in slots.items():
        source, layer = dense.cache.layers[index], cache.layers[index]
        chosen = torch.stack([_padded(own, width, source.keys.shape[1]) for own in rows])
        for name in source.written():  # an indexer has one head, which goes by the first
            theirs = getattr(source, name)
            where = chosen[:, : theirs.shape[1], :, None].expand(-1, -1, -1, theirs.shape[-1])
            layer.allocate(**{name: theirs})
            getattr(layer, name)[:, :, :width] = theirs.gather(2, where)
    for mine, theirs in zip(cache.layers, dense.cache.layers, strict=True):
        if isinstance(theirs, SlotLayer) and theirs.is_crossed:
            mine.take(theirs, slice(None))  # pictures themselves, which no slots stand for
    pads = [width - count for count in counts]
    memory = Memory(cache, width, pads, dense.rope, dense.like, dense.window, dense.bare)
    memory.offsets, memory.axes, memory.last = dense.offsets, dense.axes, dense.last
    memory.carried = dense.carried
    return KvView(memory, list(dense.kept))


def _padded(slots: Tensor, width: int, heads: int) -> Tensor:  # (1 or G, n) -> (G, width)
    """The slots of all heads, the first of them repeated on the left."""
    before = slots[:, :1].expand(-1, width - slots.shape[1])
    return torch.cat((before, slots), 1).expand(heads, -1)


def _after(memory: Memory, news: Sequence[int]) -> list[int]:
    return [kept + new for kept, new in zip(memory.kept, news, strict=True)]


def _copied(stops: Sequence[int], news: Sequence[int]) -> list[list[int]]:
    """The last `news[b]` slots before `stops[b]` per row; short rows repeat their last one."""
    width = max(news)
    return [
        [*range(stop - new, stop), *[stop - 1] * (width - new)]
        for stop, new in zip(stops, news, strict=True)
    ]
