"""Key/value memory made for speculation: write anywhere, forget for free, keep a path of a tree.

Every attention layer owns one buffer (B, heads, capacity, width). Rows write at their own slots;
what was rejected is simply not counted any more, and is overwritten later. Nothing is ever
concatenated.

    slot        0   1   2   3   4   5   6   7
    row 0       p   p   p   a  [x   y   z]  .      kept 4, block of 3 written at 4..6
    row 1       -   p   p   a   b  [x   y   z]     one padded slot, kept 5, block at 5..7

After verification row 0 keeps x and z of a tree: z moves from slot 6 to slot 5, and `kept` becomes
6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

_STATELESS = ("DummyLayer",)  # layers that borrow another layer's keys and values


class SlotLayer(CacheLayerMixin):
    """One attention layer's buffer; where to write and how far to read is the cache's plan."""

    keys: Any
    values: Any

    def __init__(self, plan: SlotPlan, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan
        self.window = window  # reads so many slots only; it keeps everything, so it can roll back

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, width = key_states.shape
        capacity = self.plan.capacity
        # zeros: a masked slot still meets 0 * value, so no NaN may lie there
        self.keys = key_states.new_zeros(batch, heads, capacity, width)
        self.values = value_states.new_zeros(batch, heads, capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self.plan.view:
            self.grow()
        plan = self.plan
        if plan.slots is None:
            stop = plan.start + key_states.shape[2]
            self.keys[:, :, plan.start : stop] = key_states
            self.values[:, :, plan.start : stop] = value_states
        else:
            self.keys[plan.rows, :, plan.slots] = key_states.transpose(1, 2)
            self.values[plan.rows, :, plan.slots] = value_states.transpose(1, 2)
        low = plan.low if self.window is not None else 0
        return self.keys[:, :, low : plan.view], self.values[:, :, low : plan.view]

    def grow(self) -> None:
        """Move to a buffer of the plan's (geometrically grown) capacity."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old.shape[2] >= self.plan.capacity:
                return
            new = old.new_zeros(*old.shape[:2], self.plan.capacity, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:  # (B, n) each
        """Copy slots within each row; the read is complete before the write, so overlap is safe."""
        self.keys[rows, :, target] = self.keys[rows, :, source]
        self.values[rows, :, target] = self.values[rows, :, source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.view, 0

    def get_seq_length(self) -> int:
        return self.plan.start

    def get_max_length(self) -> int:
        return -1


class SlotPlan:
    """Where the next forward writes and how far it reads; one object shared by all layers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.start = 0  # first slot written, when all rows write the same slots
        self.view = 0  # slots read: [0, view)
        self.low = 0  # sliding layers read [low, view)
        self.slots: Tensor | None = None  # (B, q) per-row slots
        self.rows: Tensor | None = None  # (B, 1)


class SlotCache(Cache):
    """The cache object handed to a Hugging Face model; one `plan_*` call precedes every forward.

    Hybrid models keep their recurrent layers as transformers makes them; `snapshot` and `restore`
    bring those back to a committed point (attention layers need neither). `can_branch` is False for
    them: a tree would need one recurrent state per branch.
    """

    def __init__(self, config: Any, capacity: int = 64) -> None:
        self.plan = SlotPlan(capacity)
        self.layers: list[Any]
        super().__init__(layers=[self._layer(layer) for layer in template(config)])
        self.recurrent = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]

    def _layer(self, layer: Any) -> Any:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            slides = type(layer) is DynamicSlidingWindowLayer
            return SlotLayer(self.plan, layer.sliding_window if slides else None)
        return layer

    @property
    def can_branch(self) -> bool:
        return not self.recurrent

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states)
        return result

    def plan_uniform(self, start: int, length: int) -> None:
        """All rows write slots [start, start + length)."""
        self.plan.start, self.plan.view, self.plan.slots = start, start + length, None
        self.plan.low = 0
        self.reserve(start + length)

    def plan_rows(self, slots: Tensor, view: int) -> None:
        """Row b writes `slots[b]` (B, q); every row reads [0, view)."""
        self.plan.slots, self.plan.view, self.plan.low = slots, view, 0
        self.plan.rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self.reserve(view)

    def reserve(self, slots: int) -> None:
        """Let the layers grow to so many slots, when they are next written."""
        while self.plan.capacity < slots:
            self.plan.capacity *= 2

    def move(self, source: Tensor, target: Tensor) -> None:  # (B, n) slots each
        """Copy `source[b]` to `target[b]` in every attention layer; pad rows with self-moves."""
        rows = torch.arange(source.shape[0], device=source.device)[:, None]
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.is_initialized:
                layer.move(rows, source, target)

    def snapshot(self) -> list[dict[str, dict[int, Tensor]]]:
        """Copies of all recurrent and convolution states."""
        return [
            {
                "conv_states": {
                    i: s.clone() for i, s in layer.conv_states.items() if s is not None
                },
                "recurrent_states": {
                    i: s.clone() for i, s in layer.recurrent_states.items() if s is not None
                },
            }
            for layer in self.recurrent
        ]

    def restore(self, snapshot: Sequence[dict[str, dict[int, Tensor]]]) -> None:
        """Bring the recurrent states back, in place (they have static addresses)."""
        for layer, states in zip(self.recurrent, snapshot, strict=True):
            for name, saved in states.items():
                for index, state in saved.items():
                    getattr(layer, name)[index].copy_(state)

    def row(self, config: Any, index: int) -> SlotCache:
        """One row's own cache, with what it holds so far."""
        twin = SlotCache(config, self.plan.capacity)
        for mine, layer in zip(self.layers, twin.layers, strict=True):
            if isinstance(mine, SlotLayer) and mine.is_initialized:
                layer.keys = mine.keys[index : index + 1].clone()
                layer.values = mine.values[index : index + 1].clone()
                layer.is_initialized = True
            elif isinstance(mine, LinearAttentionLayer):
                copy_states([mine], layer, slice(index, index + 1))
        return twin

    @staticmethod
    def stacked(config: Any, caches: Sequence[SlotCache], lengths: Sequence[int]) -> SlotCache:
        """The rows of several caches under each other, for attention layers only.

        Of cache i the first `lengths[i]` slots count; all end at slot max(lengths).
        """
        stop = max(lengths)
        both = SlotCache(config, max(cache.plan.capacity for cache in caches))
        for index, layer in enumerate(both.layers):
            parts = [cache.layers[index] for cache in caches]
            if not (isinstance(layer, SlotLayer) and parts[0].is_initialized):
                continue
            rows = torch.cat([part.keys[:, :, :1] for part in parts])
            values = torch.cat([part.values[:, :, :1] for part in parts])
            layer.lazy_initialization(rows, values)
            first = 0
            for part, length in zip(parts, lengths, strict=True):
                own = slice(first, first + len(part.keys))
                layer.keys[own, :, stop - length : stop] = part.keys[:, :, :length]
                layer.values[own, :, stop - length : stop] = part.values[:, :, :length]
                first = own.stop
        return both

    def bytes(self) -> int:
        """Memory held by the buffers."""
        tensors = [
            tensor
            for layer in self.layers
            if isinstance(layer, SlotLayer) and layer.is_initialized
            for tensor in (layer.keys, layer.values)
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def copy_states(
    sources: Sequence[LinearAttentionLayer],
    target: LinearAttentionLayer,
    rows: slice = slice(None),
) -> None:
    """Give `target` the recurrent and convolution states of `rows` of all sources."""
    source = sources[0]
    target.device, target.dtype = source.device, source.dtype
    for name in ("conv_states", "recurrent_states"):
        for place, state in getattr(source, name).items():
            if state is not None:
                states = [getattr(one, name)[place][rows] for one in sources]
                getattr(target, name)[place] = torch.cat(states)
    for name in (
        "is_conv_states_initialized",
        "is_recurrent_states_initialized",
        "has_previous_state",
        "conv_kernel_size",
    ):
        getattr(target, name).update(getattr(source, name))


def template(config: Any) -> list[Any]:
    """The layers transformers itself would use; refuses those that cannot be rolled back.

    Raises ValueError naming the layer class: compressed, quantised, indexed or rolling layers lose
    what a rejected draft overwrote.
    """
    text = config.get_text_config(decoder=True)
    try:
        layers = list(DynamicCache(config=config).layers)
    except AttributeError as error:  # a configuration of parts that counts no layers of its own
        raise ValueError(
            f"{type(text).__name__} does not say what layers keep a state ({error}); use plain "
            "decoding for this model"
        ) from error
    for index, layer in enumerate(layers):
        known = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
        if not known and type(layer).__name__ not in _STATELESS:
            raise ValueError(
                f"layer {index} of {type(text).__name__} keeps its state in a "
                f"{type(layer).__name__}, which cannot be rolled back after a rejected draft; use "
                "plain decoding for this model"
            )
    return layers
