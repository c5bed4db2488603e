"""Buffers of fixed capacity, and the cache that a compiled forward writes them through.

A compiled graph serves any number of cached tokens if the shapes of its tensors do not change: it
reads whole buffers, and a mask hides what is not in use. Capacities and numbers of rows are powers
of two. Buffers are lent to one request at a time, so that later requests run on the same addresses,
as graphs captured on an accelerator need.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from transformers.cache_utils import Cache

from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.slots import SlotLayer

MIN_CAPACITY = 256  # slots
MIN_SPAN = 64  # uncommitted slots, where a block follows others that are not committed
LENGTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of blocks; longer ones: powers of two
NO_END = 2**31 - 1
MAX_FREE = 2  # buffers of one shape that are kept for later requests


def round_length(length: int) -> int:
    """The length that a block is padded to."""
    return next((one for one in LENGTHS if one >= length), round_power(length))


def round_power(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return max(least, 1 << (count - 1).bit_length())


class BufferStore:
    """Buffers of requests that ended, for later ones."""

    def __init__(self) -> None:
        self.free: dict[tuple[Any, ...], list[Tensor]] = {}

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A zeroed buffer."""
        found = self.free.get((*shape, like.dtype, like.device))
        # zeros: a masked slot is still multiplied by 0, so it may not hold NaN
        return found.pop().zero_() if found else like.new_zeros(tuple(shape))

    def give_back(self, buffer: Tensor) -> None:
        kept = self.free.setdefault((*buffer.shape, buffer.dtype, buffer.device), [])
        if len(kept) < MAX_FREE:
            kept.append(buffer)


class FixedSlots:
    """The keys and values of a memory, moved to a buffer of fixed capacity.

    The memory's own cache works on the same buffer: the prompt, moved paths and eager forwards.
    `find_obstacle` says which memories have none. `buffer` is given where the memory already lies
    in one of the store.
    """

    def __init__(
        self, memory: Memory, store: BufferStore, room: int, buffer: Tensor | None = None
    ) -> None:
        pool = memory.cache.plan.pool
        assert pool.buffer is not None
        self.store, self.batch = store, memory.batch
        self.rows = round_power(memory.batch)
        self.layout = _layout_of(memory)
        self.prompt = _prompt_bias(memory, self.rows)  # (rows, L)
        self.parts: tuple[Tensor, ...]  # per layer keys, values: (rows, heads, capacity, width)
        self.base: Tensor  # (rows, capacity) bias of committed slots
        self.capacity = 0
        self.states: dict[int, Tensor] = {}  # of recorded layers, (B, q, D), of the last forward
        self._release: Any = None
        slots = max(memory.lengths) + room
        if buffer is not None and buffer.shape[3] >= slots:
            self._use(buffer)
        self.fit(memory, slots)
        self.offsets: Tensor | None = None  # (axes, rows, 1)
        if memory.axes > 1:
            self.offsets = self.prompt.new_zeros(memory.axes, self.rows, 1, dtype=torch.int64)
            if memory.offsets is not None:
                self.offsets[:, : self.batch] = memory.offsets

    @staticmethod
    def find_obstacle(memory: Any) -> str | None:
        """Why a memory cannot be moved, as a phrase; None if it can."""
        if not isinstance(memory, Memory):
            return "rows are read one by one"
        if memory.is_stepwise or not memory.axes:
            return "the model makes positions and masks itself"
        if memory.table is not None:
            return "its positions are those of a grid"
        if memory.step_inputs:
            return f"every forward takes {', '.join(sorted(memory.step_inputs))}"
        layers = memory.cache.layers
        if not all(type(layer) is SlotLayer and layer.is_pooled for layer in layers):
            return "its layers do not cache keys and values of one shape"
        return None

    def is_current(self, memory: Memory) -> bool:
        """Whether no row joined or left since, and no other buffer was put in place."""
        same = all(a is b for a, b in zip(self.layout, _layout_of(memory), strict=True))
        keys = memory.cache.layers[0].keys
        return same and self.batch == memory.batch and keys.data_ptr() == self.parts[0].data_ptr()

    def fit(self, memory: Memory, slots: int) -> None:
        """Move to a larger buffer if there are fewer slots than this."""
        if slots <= self.capacity:
            return
        old = memory.cache.plan.pool.buffer
        assert old is not None
        capacity = round_power(slots, MIN_CAPACITY)
        buffer = self.store.take(
            (old.shape[0], self.rows, old.shape[2], capacity, old.shape[4]), old
        )
        count = min(old.shape[3], capacity)
        buffer[:, : self.batch, :, :count] = old[:, :, :, :count]
        use_buffer(memory.cache, buffer[:, : self.batch])
        self._use(buffer)

    def _use(self, buffer: Tensor) -> None:
        """Use a buffer (2 layers, R, heads, C, width) of the store."""
        self.capacity, self.parts = buffer.shape[3], split_layers(buffer)
        for part in self.parts:
            torch._dynamo.mark_dynamic(part, 2)
            if part.device.type == "cuda":
                torch._dynamo.mark_static_address(part)
        self.base = self.prompt.new_zeros(self.rows, self.capacity)
        self.base[:, : self.prompt.shape[1]] = self.prompt
        if self._release is not None:
            self._release()  # gives the old buffer back
        self._release = weakref.finalize(self, self.store.give_back, buffer)

    def place(self, memory: Memory, block: TokenBlock, least: int = 1) -> tuple[Any, ...]:
        """The inputs of `BlockPlan`: tokens, depths, corner and columns, padded to fixed shapes.

        Blocks have at least `least` tokens.
        """
        length, rows = round_length(max(block.length, least)), self.rows
        width = block.num_preceding + length
        span = round_power(width, MIN_SPAN) if block.num_preceding else length
        self.fit(memory, max(memory.lengths) + width)
        tokens = pad(block.tokens, (rows, length))
        depths = pad(block.depths.expand(self.batch, -1), (rows, length))
        corner = pad(block.corner.expand(self.batch, -1, -1), (rows, length, span))
        more = [0] * (rows - self.batch)
        pads = [0] * self.batch if block.pads is None else block.pads
        last = NO_END if memory.max_position is None else memory.max_position
        columns = (
            [*memory.lengths, *more],
            [*(kept + block.num_preceding for kept in memory.lengths), *more],
            [*memory.rope, *more],
            [*pads, *more],
            [last] * rows,
        )
        return tokens, depths, corner, torch.tensor(columns, device=tokens.device)


def use_buffer(cache: SlotCache, buffer: Tensor) -> None:
    """Let a cache keep its keys and values in a buffer (2 layers, B, heads, C, width)."""
    pool, layers = cache.plan.pool, cast(Any, cache.layers)
    pool.use(buffer)
    cache.plan.capacity = buffer.shape[3]
    for layer in layers:
        at = layer.pool_index
        layer.keys, layer.values = pool.parts[at : at + 2]
        layer.is_initialized = True


class BlockPlan:
    """Slots, positions and masks of a padded block, computed by tensor operations alone.

    `columns` (5, R) are per row: committed slots, the first slot to write, the rotary position of
    the first uncommitted slot, left padding of the block, and the last position.
    """

    def __init__(
        self, depths: Tensor, corner: Tensor, columns: Tensor, base: Tensor, offsets: Tensor | None
    ) -> None:
        kept, first, rope, pads, last = columns[..., None].unbind(0)  # (R, 1) each
        length, span, capacity = depths.shape[1], corner.shape[2], base.shape[1]
        steps = torch.arange(length, device=depths.device)
        self.slots = first + (steps - pads) % length  # (R, q): left padding is written at the end
        self.queries = depths + kept  # slot of each token, as a window counts
        positions = torch.minimum((depths + rope).clamp_min(0), last)
        self.positions = positions if offsets is None else positions + offsets
        ahead = torch.arange(capacity, device=depths.device) - kept + pads  # (R, C)
        inside = (ahead >= pads) & (ahead < span)
        index = ahead.clamp(0, span - 1)[:, None].expand(-1, length, -1)
        committed = torch.where(ahead < pads, base, torch.finfo(base.dtype).min)[:, None]
        seen = corner.gather(2, index) & inside[:, None]
        self.mask = committed.masked_fill(seen, 0)[:, None]

    def mask_window(self, window: int) -> Tensor:  # (R, 1, q, C)
        """The mask of layers with a sliding window."""
        slots = torch.arange(self.mask.shape[-1], device=self.mask.device)
        hidden = slots <= (self.queries - window)[:, None, :, None]
        return self.mask.masked_fill(hidden, torch.finfo(self.mask.dtype).min)


class FixedLayer:
    """One layer of a `FixedCache`."""

    is_sliding = is_croppable = False
    is_initialized = is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self.keys, self.values, self.slots = keys, values, slots
        self.rows = torch.arange(slots.shape[0], device=slots.device)[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[self.rows, :, self.slots] = key_states.transpose(1, 2)
        self.values[self.rows, :, self.slots] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0  # of a forward with explicit positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0


def split_layers(buffer: Tensor) -> tuple[Tensor, ...]:
    """Keys and values of every layer in a buffer (2 layers, ...), as tensors of their own storage.

    What is written in one storage torch compares pairwise when it compiles: of 28 layers, for a
    quarter of the time.
    """
    return tuple(map(from_dlpack, buffer.unbind(0)))


class FixedCache(Cache):
    """The cache of one compiled forward: writes `slots` (R, q), reads whole buffers."""

    def __init__(self, parts: Sequence[Tensor], slots: Tensor) -> None:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        layers: Any = [FixedLayer(keys, values, slots) for keys, values in pairs]
        super().__init__(layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[layer_idx]
        written: tuple[Tensor, Tensor] = layer.update(key_states, value_states)
        return written


def _layout_of(memory: Memory) -> tuple[Any, ...]:
    """Tensors that are replaced where the rows of a memory change."""
    return memory.mask.buffer, memory.offsets


def _prompt_bias(memory: Memory, rows: int) -> Tensor:  # (rows, L)
    """The bias of the slots of the prompt: padding and other masked slots."""
    mask = memory.mask
    bias = mask.buffer.new_zeros(rows, max(mask.open))
    for row, stop in enumerate(mask.open):
        bias[row, :stop] = mask.buffer[min(row, len(mask.buffer) - 1), 0, 0, :stop]
    return bias


def pad(x: Tensor, shape: Sequence[int], value: float = 0) -> Tensor:
    """Pad every axis at its end; contiguous, as strides are part of a compiled shape."""
    if x.shape == tuple(shape):
        return x.contiguous()
    padded = x.new_full(tuple(shape), value)
    padded[tuple(slice(0, size) for size in x.shape)] = x
    return padded
