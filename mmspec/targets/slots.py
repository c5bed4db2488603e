"""Layers of a cache that are written anywhere and forgotten for free, see `targets.cache`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer


class SlotPlan:
    """Where the next forward writes and how far it reads; one object shared by all layers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.start = 0  # first slot written, when all rows write the same slots
        self.view = 0  # slots read: [0, view)
        self.low = 0  # sliding layers read [low, view)
        self.slots: Tensor | None = None  # (B, q) per-row slots
        self.rows: Tensor | None = None  # (B, 1)


class SlotLayer(CacheLayerMixin):
    """One attention layer's buffers; where to write and how far to read is the cache's plan.

    The two layers below keep more beside: they inherit, because transformers asks for a layer's
    base classes.
    """

    buffers: tuple[str, ...] = ("keys", "values")  # (B, heads, capacity, width) each, once written
    keys: Any
    values: Any

    def __init__(self, plan: SlotPlan, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan
        self.window = window  # reads so many slots only; it keeps everything, so it can roll back
        self.is_crossed = False  # attends to what is given once, and is never rolled back

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.allocate(keys=key_states, values=value_states)

    def allocate(self, **states: Tensor) -> None:  # (B, heads, q, width) each
        """Make buffers for states of such shapes."""
        for name, like in states.items():
            batch, heads, _, width = like.shape
            # zeros: a masked slot still meets 0 * value, so no NaN may lie there
            setattr(self, name, like.new_zeros(batch, heads, self.plan.capacity, width))
        self.is_initialized = self.keys is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.is_crossed:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        if not self.is_initialized:
            self.allocate(keys=key_states, values=value_states)
        elif self.keys.shape[2] < self.plan.view:
            self.grow()
        self.write(self.keys, key_states)
        self.write(self.values, value_states)
        low = self.plan.low if self.window is not None else 0
        return self.keys[:, :, low : self.plan.view], self.values[:, :, low : self.plan.view]

    def write(self, buffer: Tensor, states: Tensor) -> None:  # (B, heads, q, width)
        """Put states where the plan says."""
        plan = self.plan
        if plan.slots is None:
            buffer[:, :, plan.start : plan.start + states.shape[2]] = states
        else:
            buffer[plan.rows, :, plan.slots] = states.transpose(1, 2)

    def written(self) -> list[str]:
        """Names of the buffers of slots that there are by now."""
        own = () if self.is_crossed else self.buffers
        return [name for name in own if getattr(self, name) is not None]

    def grow(self) -> None:
        """Move to buffers of the plan's (geometrically grown) capacity."""
        for name in self.written():
            old = getattr(self, name)
            if old.shape[2] < self.plan.capacity:
                new = old.new_zeros(*old.shape[:2], self.plan.capacity, old.shape[3])
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:  # (B, n) each
        """Copy slots within each row; the read is complete before the write, so overlap is safe."""
        for name in self.written():
            buffer = getattr(self, name)
            buffer[rows, :, target] = buffer[rows, :, source]

    def take(self, other: SlotLayer, rows: slice) -> None:
        """Hold what some rows of another layer hold."""
        if other.is_initialized:
            for name in other.written() or ("keys", "values"):
                setattr(self, name, getattr(other, name)[rows].clone())
        self.is_initialized = other.is_initialized

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.view, 0

    def get_seq_length(self) -> int:
        return self.plan.start

    def get_max_length(self) -> int:
        return -1


class IndexedSlotLayer(SlotLayer):
    """The same with the keys of an indexer (sparse attention), and the positions of those."""

    buffers = ("keys", "values", "index", "places")

    def __init__(self, plan: SlotPlan, window: int | None = None) -> None:
        super().__init__(plan, window)
        self.index: Any = None  # (B, 1, capacity, width)
        self.places: Any = None  # (B, 1, capacity, axes)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:  # (B, q, width)
        """Write an indexer's keys; returns all that are read, (B, view, width)."""
        return self._noted("index", indexer_key_states[:, None])[:, 0, : self.plan.view]

    @property
    def indexer_position_ids(self) -> Tensor | None:  # (axes, B, start)
        """Positions of what was written before this forward, which the model appends its own to."""
        if self.places is None:
            return None
        if self.plan.slots is not None:
            raise ValueError("positions of an indexer are kept for rows of equal length only")
        before: Tensor = self.places[:, 0, : self.plan.start].permute(2, 0, 1)
        return before

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:  # (axes, B, start + q)
        new = positions[..., self.plan.start :].permute(1, 2, 0)
        self._noted("places", new[:, None])

    def _noted(self, name: str, states: Tensor) -> Tensor:  # (B, 1, q, width)
        if getattr(self, name) is None:
            self.allocate(**{name: states})
        self.grow()
        buffer: Tensor = getattr(self, name)
        self.write(buffer, states)
        return buffer


class StatefulSlotLayer(LinearAttentionLayer, SlotLayer):
    """The same with convolution and recurrent states, which are brought back from a copy."""

    is_compileable = False
    is_croppable = False

    def __init__(self, plan: SlotPlan, window: int | None = None, states: int = 1) -> None:
        SlotLayer.__init__(self, plan, window)
        LinearAttentionLayer.__init__(self, number_of_states=states)
