"""Cache layers that are written at given slots and rolled back at no cost; see `targets.cache`.

`Mask` hides the slots that a query may not attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from mmspec.trees import mask_values

if TYPE_CHECKING:
    from mmspec.targets.memory import TokenBlock

MAX_POOL_BYTES = 2**30
CHECKED_BYTES = 2**28  # of keys and values, from which free memory of the host is looked up


class BatchTooLarge(torch.OutOfMemoryError, ValueError):
    """Keys and values of a batch exceed the memory of their device."""


class SlotPlan:
    """The slots that the next forward writes and reads; shared by all layers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.start = 0  # first slot written, when all rows write the same slots
        self.view = 0  # slots read: [0, view)
        self.low = 0  # sliding layers read [low, view)
        self.slots: Tensor | None = None  # (B, q) per-row slots
        self.rows: Tensor | None = None  # (B, 1)
        self.pool = SlotPool(0)


class SlotPool:
    """Keys and values of all layers of one shape in one tensor, sliced once per forward.

    Slicing every buffer of every layer costs more than writing a token does. Layers of another
    shape, dtype or device, and those that need gradients, have buffers of their own; so have all
    layers where the pool would exceed `MAX_POOL_BYTES`, as it is allocated and grown at once.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.buffer: Tensor | None = None  # (2 layers, B, heads, capacity, width)
        self.parts: tuple[Tensor, ...] = ()  # per layer keys, values: (B, heads, capacity, width)
        self.key: tuple[int, ...] = ()  # what the slices below are of
        self.written: tuple[Tensor, ...] = ()  # slots of the forward, like `parts`
        self.read: tuple[Tensor, ...] = ()

    def allocate(self, keys: Tensor, values: Tensor, capacity: int) -> bool:
        """Allocate the buffers for states (B, heads, q, width), or check that they fit."""
        if torch.is_grad_enabled() or keys.shape != values.shape or keys.dtype != values.dtype:
            return False
        batch, heads, _, width = keys.shape
        size = 2 * self.num_layers * keys[:, :, :1].numel() * capacity * keys.element_size()
        if self.buffer is None and size > MAX_POOL_BYTES:
            return False
        if self.buffer is None:
            self.use(keys.new_zeros(2 * self.num_layers, batch, heads, capacity, width))
        assert self.buffer is not None
        fits = self.buffer.shape[1:3] == (batch, heads) and self.buffer.shape[4] == width
        return fits and self.buffer.dtype == keys.dtype and self.buffer.device == keys.device

    def grow(self, capacity: int) -> None:
        """Move to a buffer of this capacity."""
        assert self.buffer is not None
        old, shape = self.buffer, self.buffer.shape
        new = old.new_zeros(*shape[:3], capacity, shape[4])
        new[:, :, :, : shape[3]] = old
        self.use(new)

    def slice(self, start: int, length: int, view: int) -> None:
        """Slice the slots [start, start + length) to write and [0, view) to read."""
        if self.key != (start, length, view):
            assert self.buffer is not None
            self.key = (start, length, view)
            self.written = self.buffer.narrow(3, start, length).unbind(0)
            self.read = self.buffer.narrow(3, 0, view).unbind(0)

    def use(self, buffer: Tensor) -> None:
        """Use these slots."""
        self.buffer, self.parts, self.key = buffer, buffer.unbind(0), ()


class SlotLayer(CacheLayerMixin):
    """Buffers of one attention layer; the plan of the cache gives the slots to write and read.

    The subclasses below hold further states; they inherit because transformers checks the base
    classes of a layer.
    """

    buffers: tuple[str, ...] = ("keys", "values")  # (B, heads, capacity, width) each, once written
    keys: Any
    values: Any

    def __init__(
        self, plan: SlotPlan, window: int | None = None, pool_index: int | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan
        self.window = window  # number of slots read; all are kept, for rollback
        self.pool_index = pool_index  # of its keys in the pool; None = buffers of its own
        self.is_cross_attention = False  # its states are given once and never rolled back

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.allocate(keys=key_states, values=value_states)

    def allocate(self, **states: Tensor) -> None:  # (B, heads, q, width) each
        """Allocate buffers for states of such shapes."""
        for name, like in states.items():
            batch, heads, _, width = like.shape
            # zeros: a masked slot is still multiplied by 0, so it may not hold NaN
            setattr(self, name, like.new_zeros(batch, heads, self.plan.capacity, width))
        self.is_initialized = self.keys is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.is_cross_attention:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        if not self.is_initialized:
            self.allocate_states(key_states, value_states)
        elif self.keys.shape[2] < self.plan.view:
            self.grow()
        if self.is_pooled and self.plan.slots is None:
            return self._update_pooled(key_states, value_states)
        self.write(self.keys, key_states)
        self.write(self.values, value_states)
        low = self.plan.low if self.window is not None else 0
        return self.keys[:, :, low : self.plan.view], self.values[:, :, low : self.plan.view]

    @property
    def is_pooled(self) -> bool:
        """Whether the buffers are those of the pool."""
        at, parts = self.pool_index, self.plan.pool.parts
        return at is not None and bool(parts) and self.keys is parts[at]

    def allocate_states(self, keys: Tensor, values: Tensor) -> None:
        """Allocate buffers, in the pool where they fit it. Raises BatchTooLarge."""
        pool, at = self.plan.pool, self.pool_index
        if at == 0:
            _check_host_memory(keys, values, pool.num_layers)
        try:
            if at is not None and pool.allocate(keys, values, self.plan.capacity):
                self.keys, self.values = pool.parts[at], pool.parts[at + 1]
                self.is_initialized = True
            else:
                self.allocate(keys=keys, values=values)
        except torch.OutOfMemoryError as error:
            free = _free_bytes(keys.device)
            if free is None:
                raise
            raise _too_large(keys, values, pool.num_layers, self.plan.capacity, free) from error

    def _update_pooled(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        plan, pool, at = self.plan, self.plan.pool, self.pool_index
        assert at is not None
        pool.slice(plan.start, keys.shape[2], plan.view)
        pool.written[at].copy_(keys)
        pool.written[at + 1].copy_(values)
        read, low = (pool.read[at], pool.read[at + 1]), plan.low if self.window is not None else 0
        return read if not low else (read[0][:, :, low:], read[1][:, :, low:])

    def write(self, buffer: Tensor, states: Tensor) -> None:  # (B, heads, q, width)
        """Write states to the planned slots."""
        plan = self.plan
        if plan.slots is None:
            buffer[:, :, plan.start : plan.start + states.shape[2]] = states
        else:
            assert plan.rows is not None
            rows, slots = plan.rows.to(buffer.device), plan.slots.to(buffer.device)
            buffer[rows, :, slots] = states.transpose(1, 2)

    def buffer_names(self) -> list[str]:
        """Names of the allocated slot buffers."""
        own = () if self.is_cross_attention else self.buffers
        return [name for name in own if getattr(self, name) is not None]

    def grow(self) -> None:
        """Move to buffers of the plan's (geometrically grown) capacity."""
        for name in self.buffer_names():
            old = getattr(self, name)
            if old.shape[2] < self.plan.capacity:
                new = old.new_zeros(*old.shape[:2], self.plan.capacity, old.shape[3])
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:  # (B, n) each
        """Copy slots within each row; the read is complete before the write, so overlap is safe."""
        for name in self.buffer_names():
            buffer = getattr(self, name)
            rows, source, target = (one.to(buffer.device) for one in (rows, source, target))
            buffer[rows, :, target] = buffer[rows, :, source]

    def copy_rows(self, other: SlotLayer, rows: slice) -> None:
        """Copy some rows of another layer."""
        if other.is_initialized:
            for name in other.buffer_names() or ("keys", "values"):
                setattr(self, name, getattr(other, name)[rows].clone())
        self.is_initialized = other.is_initialized

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.view, 0

    def get_seq_length(self) -> int:
        return self.plan.start

    def get_max_length(self) -> int:
        return -1


class IndexedSlotLayer(SlotLayer):
    """A slot layer with the keys of an indexer (sparse attention) and their positions."""

    buffers = ("keys", "values", "index", "places")

    def __init__(self, plan: SlotPlan, window: int | None = None) -> None:
        super().__init__(plan, window)
        self.index: Any = None  # (B, 1, capacity, width)
        self.places: Any = None  # (B, 1, capacity, axes)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:  # (B, q, width)
        """Write an indexer's keys; return all that are read, (B, view, width)."""
        return self._write_buffer("index", indexer_key_states[:, None])[:, 0, : self.plan.view]

    @property
    def indexer_position_ids(self) -> Tensor | None:  # (axes, B, start)
        """Positions written before this forward; the model appends its own."""
        if self.places is None:
            return None
        if self.plan.slots is not None:
            raise ValueError("positions of an indexer need rows of equal length; decode row by row")
        before: Tensor = self.places[:, 0, : self.plan.start].permute(2, 0, 1)
        return before

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:  # (axes, B, start + q)
        new = positions[..., self.plan.start :].permute(1, 2, 0)
        self._write_buffer("places", new[:, None])

    def _write_buffer(self, name: str, states: Tensor) -> Tensor:  # (B, 1, q, width)
        if getattr(self, name) is None:
            self.allocate(**{name: states})
        self.grow()
        buffer: Tensor = getattr(self, name)
        self.write(buffer, states)
        return buffer


class StatefulSlotLayer(LinearAttentionLayer, SlotLayer):
    """A slot layer with convolution and recurrent states, which are restored from a copy."""

    is_compileable = False
    is_croppable = False

    def __init__(self, plan: SlotPlan, window: int | None = None, states: int = 1) -> None:
        SlotLayer.__init__(self, plan, window)
        LinearAttentionLayer.__init__(self, number_of_states=states)


def _check_host_memory(keys: Tensor, values: Tensor, layers: int) -> None:
    """Refuse states (B, heads, q, width) of a prompt that the host cannot hold.

    Its allocator gives memory that is not there, and the process is killed when it is written.
    Raises BatchTooLarge.
    """
    size = layers * (keys.numel() + values.numel()) * keys.element_size()
    if keys.device.type != "cpu" or size < CHECKED_BYTES:
        return
    free = _free_bytes(keys.device)
    if free is not None and size > free:
        raise _too_large(keys, values, layers, keys.shape[2], free)


def _free_bytes(device: torch.device) -> int | None:
    """Free memory of a device, that kept by torch's own allocator included."""
    footprint = import_module("mmspec.models.footprint")  # by those who are short of memory
    free: int | None = footprint.free_bytes(device)
    if free is not None and device.type == "cuda":
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free


def _too_large(keys: Tensor, values: Tensor, layers: int, slots: int, free: int) -> BatchTooLarge:
    rows, heads, _, width = keys.shape
    widths = heads * width + values.shape[1] * values.shape[3]
    each = layers * slots * keys.element_size() * widths
    names = import_module("mmspec.models.footprint")
    fits = free // each
    advice = (
        f"the largest batch that fits has {fits} rows; give fewer prompts at a time"
        if fits
        else "not even one row fits; give a shorter prompt or a smaller dtype"
    )
    return BatchTooLarge(
        f"{rows} rows of {slots} slots need {names.format_bytes(rows * each)} for keys and values, "
        f"and {keys.device} has {names.format_bytes(free)} free: {advice}"
    )


LINES = 32  # query lines at first: pending tokens and draft nodes


class Mask:
    """An additive attention mask reused between rounds; only changed slots are written.

    Invariant: in row b, all query lines attend to exactly the unpadded slots below `open[b]`; from
    there up to `dirty[b]` values are arbitrary; above, everything is masked.
    """

    def __init__(self, padding: Sequence[int], slots: int, like: Tensor) -> None:
        self.device, self.dtype = like.device, like.dtype
        self.hide = torch.finfo(like.dtype).min
        self.open = [slots] * len(padding)
        self.dirty = [slots] * len(padding)
        batch = len(padding) if any(padding) else 1
        self.buffer = like.new_full((batch, 1, LINES, max(2 * slots, 64)), self.hide)
        self.buffer[..., :slots] = 0
        for row, pad in enumerate(padding[:batch]):
            self.buffer[row, :, :, :pad] = self.hide

    def add(self, bias: Tensor) -> None:  # (B, L), of the slots of the prompt, permanently
        self._fit(0, 0, len(bias))
        own = self.buffer[..., : bias.shape[1]]
        own.add_(bias.to(self.dtype)[:, None, None]).clamp_min_(self.hide)

    def place_uniform(self, at: int, corner: Tensor, shown: int = 0) -> Tensor:
        """Write the corner at slot `at` of all rows; view (B or 1, 1, q, at + width) or `shown`."""
        lines, stop = corner.shape[1], at + corner.shape[2]
        self._fit(lines, stop, corner.shape[0])
        is_alone = lines == 1 and stop == at + 1  # a token that sees itself, as all later ones do
        opened, until = min(self.open), at + is_alone
        if opened < until:
            self.buffer.narrow(3, opened, until - opened).zero_()
        if not is_alone:
            seen = corner[:, None] if len(corner) > 1 else corner
            values = mask_values(len(self.buffer), self.dtype, self.device)
            torch.where(seen, *values, out=self.view(lines, at, stop))
        self.open = [until] * len(self.open)
        self.dirty = [max(dirty, stop) for dirty in self.dirty]
        return self.view(shown or lines, 0, at + shown if shown else stop)

    def view(self, lines: int, start: int, stop: int, first: int = 0) -> Tensor:
        """Query lines from the `first` on over some slots; a single operation."""
        own = self.buffer
        offset = own.storage_offset() + start + first * own.stride(2)
        return own.as_strided((own.shape[0], 1, lines, stop - start), own.stride(), offset)

    def place_ragged(self, at: Sequence[int], block: TokenBlock, view: int) -> Tensor:
        """Write the block's corner at slot `at[b]` of row b; return a view (B, 1, q, view)."""
        lines, span = block.length, block.corner.shape[2]
        start = [min(pair) for pair in zip(self.open, at, strict=True)]
        stop = [max(dirty, slot + span) for dirty, slot in zip(self.dirty, at, strict=True)]
        width = max(high - low for low, high in zip(start, stop, strict=True))
        self._fit(lines, max(view, max(start) + width), len(at))
        first = torch.tensor(start, device=self.device)[:, None]
        columns = first + torch.arange(width, device=self.device)  # (B, W) slots
        offset = columns - torch.tensor(at, device=self.device)[:, None]
        past = (offset < 0)[:, None]
        lower = past.expand(-1, self.buffer.shape[2] - lines, -1)
        seen = torch.cat((past | self._shift_corner(block, offset), lower), 1)
        value = torch.where(seen[:, None], *mask_values(1, self.dtype, self.device))
        self.buffer.scatter_(3, columns[:, None, None].expand_as(value), value)
        self.open, self.dirty = list(at), [slot + span for slot in at]
        return self.buffer[:, :, :lines, :view]

    def _shift_corner(self, block: TokenBlock, offset: Tensor) -> Tensor:  # (B, q, W) bool
        """The block's corner by slot offset, without left padding."""
        lines, span = block.length, block.corner.shape[2]
        if block.pads is not None:
            offset = offset + torch.tensor(block.pads, device=self.device)[:, None]
        inside = (offset >= 0) & (offset < span)
        index = offset.clamp(0, span - 1)[:, None].expand(-1, lines, -1)
        return inside[:, None] & block.corner.expand(len(offset), -1, -1).gather(2, index)

    def _fit(self, lines: int, slots: int, batch: int) -> None:
        old = self.buffer
        if lines <= old.shape[2] and slots <= old.shape[3] and batch <= old.shape[0]:
            return
        shape = (
            max(batch, old.shape[0]),
            1,
            max(lines, old.shape[2]),
            old.shape[3] if slots <= old.shape[3] else 2 * slots,
        )
        self.buffer = old.new_full(shape, self.hide)
        self.buffer[:, :, : old.shape[2], : old.shape[3]] = old
        for row in range(shape[0]):  # new lines start with the slots open to all lines
            self.buffer[row, :, old.shape[2] :, : self.open[row]] = old[
                min(row, old.shape[0] - 1), 0, 0, : self.open[row]
            ]
