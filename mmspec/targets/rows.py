"""Rows that join and leave a running batch, between rounds.

Rows in use are the first n of every buffer, whose capacity may be larger. A row that joins is
copied behind them; where one leaves, the last one moves into its place, and the freed slots are
cleared:

    in use   a b c . .      b leaves      a c . . .      d joins      a c d . .

No buffer is moved as a whole, except where it grows by doubling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, RowMemories
from mmspec.targets.readers.rotary import PositionTable
from mmspec.targets.slots import SlotLayer

T = TypeVar("T")


class CannotJoin(ValueError):
    """A row that cannot run in this batch; it can in another one."""


@runtime_checkable
class RowState(Protocol):
    """The state of a drafter whose rows may join and leave."""

    def join(self, other: Self) -> None:
        """Append the rows of another state. Raises CannotJoin before anything is changed."""

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""


def join_states(drafter: Any, state: Any, other: Any) -> None:
    """Append the rows of another request to a drafter's state.

    Raises CannotJoin for a drafter whose state is not a `RowState`.
    """
    if state is None and other is None:
        return
    if not isinstance(state, RowState):
        raise CannotJoin(
            f"{type(drafter).__name__} keeps the state of whole requests ({type(state).__name__} "
            "has no join() and drop()), so requests cannot run as one batch; choose a recipe such "
            "as coupled, eagle-3 or prompt-lookup"
        )
    state.join(other)


def swap_out(rows: list[T], row: int) -> None:
    """Remove an entry; the last one takes its place."""
    rows[row] = rows[-1]
    rows.pop()


def kept_rows(count: int, row: int) -> list[int]:
    """The rows that remain, in their new order."""
    rows = list(range(count))
    swap_out(rows, row)
    return rows


def check_joins(memory: Memory | RowMemories, other: Memory | RowMemories) -> None:
    """Raises CannotJoin for memories of different kinds: these are read in different ways."""
    if isinstance(memory, RowMemories) or isinstance(other, RowMemories):
        if not (isinstance(memory, RowMemories) and isinstance(other, RowMemories)):
            raise CannotJoin("one of these requests is read row by row")
        return
    ours, theirs = _layout(memory), _layout(other)
    if ours != theirs:
        raise CannotJoin(f"the rows are placed differently: {ours} and {theirs}")


def join_memories(
    memory: Memory | RowMemories, other: Memory | RowMemories
) -> Memory | RowMemories:
    """Append the rows of the memory of another request; the first one is changed and returned.

    Raises CannotJoin before anything is changed.
    """
    memory, other = to_joinable(memory), to_joinable(other)
    check_joins(memory, other)
    if isinstance(memory, RowMemories):
        assert isinstance(other, RowMemories)
        memory.rows += other.rows
        return memory
    assert isinstance(other, Memory)
    count = memory.batch
    _store_of(memory).join(other.cache, count, other.lengths)
    _join_masks(memory, other)
    if memory.offsets is not None or other.offsets is not None:
        memory.offsets = torch.cat((_offsets_of(memory), _offsets_of(other)), 1)
    if memory.table is not None and other.table is not None:
        memory.table = PositionTable.concatenate((memory.table, other.table))
    memory.step_inputs = _join_step_inputs(memory, other)
    memory.lengths += other.lengths
    memory.rope += other.rope
    memory.padding += other.padding
    memory.is_maskless = memory.is_maskless and other.is_maskless
    return memory


def join_slotted(memory: Memory, other: Memory) -> Memory:
    """As `join_memories`, for networks that cannot read row by row."""
    joined = join_memories(memory, other)
    if isinstance(joined, RowMemories):
        raise CannotJoin("a head reads rows together, and the slots of one of these are masked")
    return joined


def drop_row(memory: Memory | RowMemories, row: int) -> None:
    """Remove a row; the last one takes its place. One row must remain.

    Raises CannotJoin for several rows that cannot be separated.
    """
    if isinstance(memory, RowMemories):
        swap_out(memory.rows, row)
        return
    to_joinable(memory)
    count, last = memory.batch, memory.batch - 1
    _store_of(memory).drop(row, count, memory.lengths[last])
    mask = memory.mask
    mask.buffer[row] = mask.buffer[last]
    mask.buffer = mask.buffer[:last]
    kept = kept_rows(count, row)
    if memory.offsets is not None:
        memory.offsets = memory.offsets[:, kept]
    if memory.table is not None:
        memory.table = memory.table.select(kept)
    memory.step_inputs = {
        name: value[kept] if _has_rows(value, count) else value
        for name, value in memory.step_inputs.items()
    }
    padding = list(memory.padding)
    for rows in (memory.lengths, memory.rope, padding, mask.open, mask.dirty):
        swap_out(rows, row)
    memory.padding = tuple(padding)


def to_joinable(memory: Memory | RowMemories) -> Memory | RowMemories:
    """The memory of a request in the form in which others can join it, without left padding.

    A memory that blocks of different lengths cannot be placed in is read row by row: recurrent
    states, the model's own steps, layers with states beside keys and values, masked or weighted
    slots inside a prompt. Raises CannotJoin for such a memory of several rows.
    """
    if isinstance(memory, RowMemories) or memory.cache.store is not None:
        return memory
    lines = memory.mask.buffer[:, 0, 0]  # (1 or B, L)
    rows = zip(range(memory.batch), memory.padding, memory.mask.open, strict=True)
    is_plain = (
        not memory.is_stepwise
        and memory.source is None
        and memory.model_cache is memory.cache
        and all(type(one) is SlotLayer and not one.is_cross_attention for one in _layers(memory))
        and not any(bool(lines[min(at, len(lines) - 1), a:b].any()) for at, a, b in rows)
    )
    if not is_plain:
        if memory.batch != 1:
            raise CannotJoin(f"{memory.batch} rows of the cache cannot be separated")
        return RowMemories([memory])
    _open_rows(memory)
    if any(memory.padding):
        _drop_padding(memory)
    return memory


def _drop_padding(memory: Memory) -> None:
    """Move the slots of every row to the front.

    . . a b c          a b c . .
    d e f g h    ->    d e f g h
    """
    pads = memory.padding
    lengths = [length - pad for length, pad in zip(memory.lengths, pads, strict=True)]
    places = torch.arange(max(lengths), device=memory.like.device).expand(memory.batch, -1)
    shift = torch.tensor(pads, device=places.device)[:, None]
    own = torch.tensor(lengths, device=places.device)[:, None]
    memory.cache.move(torch.where(places < own, places + shift, places), places)
    mask = memory.mask
    mask.buffer = mask.buffer.clone()  # compiled reads notice another one
    for row, (length, stop) in enumerate(zip(lengths, memory.lengths, strict=True)):
        mask.buffer[row, :, :, :length] = 0
        mask.open[row] = length
        mask.dirty[row] = max(mask.dirty[row], stop)
    memory.lengths, memory.padding = lengths, (0,) * memory.batch


@dataclass
class RowStore:
    """The buffers of a cache, with room for more rows than are in use."""

    cache: SlotCache
    buffers: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)  # (R, heads, L, width)
    pool: Tensor | None = None  # (2 layers, R, heads, L, width)

    def join(self, other: SlotCache, count: int, lengths: Sequence[int]) -> None:
        """Copy the rows of another cache behind the first `count`."""
        self._adopt()
        stop, slots = count + len(lengths), max(self.cache.plan.capacity, other.plan.capacity)
        self._reserve(stop, slots)
        used, theirs = max(lengths), other.plan.pool.buffer
        is_whole = self._is_pooled and theirs is not None and _is_pooled(other)
        if is_whole:
            assert self.pool is not None
            assert theirs is not None
            self.pool[:, count:stop, :, :used] = theirs[:, :, :, :used]
        for mine, layer in zip(self._own(), () if is_whole else other.layers, strict=not is_whole):
            for name, buffer in mine.items():
                buffer[count:stop, :, :used] = getattr(layer, name)[:, :, :used]
        self._show(stop)

    def drop(self, row: int, count: int, length: int) -> None:
        """Move the last of `count` rows, of `length` slots, to `row`; the freed slots are zero.

        A masked slot is still multiplied by 0, so it may not hold NaN.
        """
        self._adopt()
        last = count - 1
        if self._is_pooled:
            assert self.pool is not None
            buffers = [self.pool.transpose(0, 1)]  # (R, 2 layers, heads, L, width)
        else:
            buffers = [buffer for mine in self._own() for buffer in mine.values()]
        for buffer in buffers:
            if row != last:
                buffer[row, ..., :length, :] = buffer[last, ..., :length, :]
                buffer[row, ..., length:, :] = 0
            buffer[last] = 0
        self._show(last)

    @property
    def _is_pooled(self) -> bool:
        """Whether all layers are in the pool."""
        return self.pool is not None and _is_pooled(self.cache)

    def _layers(self) -> list[SlotLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, SlotLayer)]

    def _own(self) -> list[Mapping[str, Tensor]]:
        return [self.buffers[index] for index in range(len(self._layers()))]

    def _adopt(self) -> None:
        """Take the buffers of the cache for these, where it has grown or never joined."""
        pooled = self.cache.plan.pool.buffer
        if pooled is not None and not _is_part(pooled, self.pool):
            self.pool = pooled
        for index, layer in enumerate(self._layers()):
            for name in layer.buffer_names():
                now = getattr(layer, name)
                if layer.is_pooled:
                    at = layer.pool_index + (name == "values")  # type: ignore[operator]
                    assert self.pool is not None
                    self.buffers[index] = {**self.buffers.get(index, {}), name: self.pool[at]}
                elif not _is_part(now, self.buffers.get(index, {}).get(name)):
                    self.buffers[index] = {**self.buffers.get(index, {}), name: now}
        self.cache.plan.capacity = max(
            self.cache.plan.capacity, *(x.shape[2] for own in self._own() for x in own.values())
        )

    def _reserve(self, rows: int, slots: int) -> None:
        """Grow to at least so many rows and slots, rows by doubling."""
        pooled = [layer.is_pooled for layer in self._layers()]
        if self.pool is not None:
            self.pool = _grow(self.pool, 1, rows, slots)
        for index, layer in enumerate(self._layers()):
            if pooled[index]:
                assert self.pool is not None
                assert layer.pool_index is not None
                at = layer.pool_index
                self.buffers[index] = {"keys": self.pool[at], "values": self.pool[at + 1]}
            else:
                own = self.buffers[index]
                self.buffers[index] = {n: _grow(x, 0, rows, slots) for n, x in own.items()}
        self.cache.plan.capacity = max(self.cache.plan.capacity, slots)

    def _show(self, rows: int) -> None:
        """Let the cache use the first `rows`."""
        pooled = [layer.is_pooled for layer in self._layers()]
        pool = self.cache.plan.pool
        if self.pool is not None:
            pool.use(self.pool[:, :rows])
        for index, layer in enumerate(self._layers()):
            if pooled[index]:
                at = layer.pool_index
                assert at is not None
                layer.keys, layer.values = pool.parts[at : at + 2]
            else:
                for name, buffer in self.buffers[index].items():
                    setattr(layer, name, buffer[:rows])


def _is_pooled(cache: SlotCache) -> bool:
    """Whether all layers of a cache are in its pool."""
    return all(isinstance(layer, SlotLayer) and layer.is_pooled for layer in cache.layers)


def _grow(buffer: Tensor, axis: int, rows: int, slots: int) -> Tensor:
    """A buffer whose `axis` holds so many rows, with so many slots on the last but one axis."""
    shape = list(buffer.shape)
    if shape[axis] >= rows and shape[-2] >= slots:
        return buffer
    shape[axis] = shape[axis] if shape[axis] >= rows else max(rows, 2 * shape[axis])
    shape[-2] = max(shape[-2], slots)
    made = buffer.new_zeros(shape)
    used = tuple(slice(0, size) for size in buffer.shape)
    made[used] = buffer
    return made


def _is_part(view: Tensor, whole: Tensor | None) -> bool:
    return whole is not None and view.data_ptr() == whole.data_ptr()


def _store_of(memory: Memory) -> RowStore:
    if memory.cache.store is None:
        memory.cache.store = RowStore(memory.cache)
    found: RowStore = memory.cache.store
    return found


def _layers(memory: Memory) -> Sequence[Any]:
    return memory.cache.layers


def _layout(memory: Memory) -> tuple[Any, ...]:
    """What rows of one batch have in common."""
    names = tuple(sorted(memory.step_inputs))
    return (memory.axes, memory.table is None, memory.window, memory.max_position, names)


def _offsets_of(memory: Memory) -> Tensor:  # (axes, B, 1)
    if memory.offsets is not None:
        return memory.offsets
    return torch.zeros(memory.axes, memory.batch, 1, dtype=torch.int64, device=memory.like.device)


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count


def _join_step_inputs(memory: Memory, other: Memory) -> dict[str, Any]:
    joined = {}
    for name, value in memory.step_inputs.items():
        theirs = other.step_inputs[name]
        both = _has_rows(value, memory.batch) and _has_rows(theirs, other.batch)
        joined[name] = torch.cat((value, theirs)) if both else value
    return joined


def _open_rows(memory: Memory) -> None:
    """Give the mask one row per row of the batch, also where all rows are equal."""
    mask = memory.mask
    if len(mask.buffer) < memory.batch:
        mask.buffer = mask.buffer.repeat(memory.batch, 1, 1, 1)


def _join_masks(memory: Memory, other: Memory) -> None:
    mask, theirs = memory.mask, other.mask
    _open_rows(memory)
    size = max(mask.buffer.shape[3], theirs.buffer.shape[3])
    lines = mask.buffer.shape[2]
    made = mask.buffer.new_full((memory.batch + other.batch, 1, lines, size), mask.hide)
    made[: memory.batch, :, :, : mask.buffer.shape[3]] = mask.buffer
    for row, stop in enumerate(theirs.open):
        made[memory.batch + row, :, :, :stop] = 0
    mask.buffer = made
    mask.open = [*mask.open, *theirs.open]
    mask.dirty = [*mask.dirty, *theirs.open]
