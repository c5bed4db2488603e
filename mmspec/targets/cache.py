"""Key/value cache for speculation: per-row slots, rollback without cost, paths of a tree.

Every attention layer owns one buffer (B, heads, capacity, width). Rows write at their own slots;
rejected slots are not counted and are overwritten later. Nothing is concatenated.

    slot        0   1   2   3   4   5   6   7
    row 0       p   p   p   a  [x   y   z]  .      length 4, block of 3 written at 4..6
    row 1       -   p   p   a   b  [x   y   z]     one padded slot, length 5, block at 5..7

After verification row 0 keeps x and z of a tree: z moves from slot 6 to slot 5; its length is 6.

Recurrent, convolution, compressed, rolling and static layers overwrite their states. A copy of all
their tensors and counters restores a committed point, and the tokens accepted after it are read
again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from mmspec import _hf
from mmspec.targets.slots import IndexedSlotLayer, SlotLayer, SlotPlan, SlotPool, StatefulSlotLayer

# layers of transformers, and the slot layers that replace them
_SLOTTED: dict[type, type[SlotLayer]] = {
    DynamicLayer: SlotLayer,
    DynamicSlidingWindowLayer: SlotLayer,
    DynamicIndexedLayer: IndexedSlotLayer,
    LinearAttentionAndFullAttentionLayer: StatefulSlotLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: StatefulSlotLayer,
}

State = dict[str, Any]
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.Size)
_SLOTS = ("plan", "window", "pool_index", "is_initialized", *SlotLayer.buffers)  # need no copy


class SlotCache(Cache):
    """The cache passed to a Hugging Face model; one `plan_*` call precedes every forward.

    Keys and values are stored in slots. Recurrent layers are those of transformers, and so is every
    layer of a model that has one of another kind (compressed, rolling, static: their masks and
    lengths depend on each other); `snapshot` and `restore` return these to a committed point.
    `can_branch` is False for them: a tree would need one state per branch. `is_slotted` is whether
    all attention layers use slots, so that blocks can be placed and masked.
    """

    def __init__(self, config: Any, capacity: int = 64) -> None:
        self.plan = SlotPlan(capacity)
        self.layers: list[Any]
        made = make_layers(config)
        self.is_slotted = all(
            type(layer) in (*_SLOTTED, LinearAttentionLayer, DummyLayer) for layer in made
        )
        super().__init__(layers=[self._layer(layer) for layer in made])
        for index in cross_attention_layers(config.get_text_config(decoder=True)):
            self.layers[index].is_cross_attention = True
        pooled = [one for one in self._slot_layers() if not one.is_cross_attention]
        for index, layer in enumerate(pooled):
            layer.pool_index = 2 * index
        self.plan.pool = SlotPool(len(pooled))
        self.stateful = [layer for layer in self.layers if _has_state(layer)]
        self.store: Any = None  # buffers with room for more rows, see `targets.rows`

    def _layer(self, layer: Any) -> Any:
        kind = _SLOTTED.get(type(layer)) if self.is_slotted else None
        if kind is None:
            return layer
        window = getattr(layer, "sliding_window", None)
        if kind is StatefulSlotLayer:
            return StatefulSlotLayer(self.plan, window, layer.number_of_states)
        return kind(self.plan, window)

    def _slot_layers(self) -> list[SlotLayer]:
        """The layers whose keys and values may lie in the pool."""
        return [layer for layer in self.layers if type(layer) is SlotLayer]

    @property
    def can_branch(self) -> bool:
        return not self.stateful

    def make_empty(self) -> SlotCache:
        """An empty cache of the same layers; needs `can_branch`."""
        twin = copy.copy(self)
        twin.plan = SlotPlan(64)
        twin.plan.pool = SlotPool(self.plan.pool.num_layers)
        twin.layers = [copy.copy(layer) for layer in self.layers]
        for layer in twin.layers:
            if isinstance(layer, SlotLayer):
                layer.plan = twin.plan
        return twin

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
        """Let the layers grow to at least this many slots at the next write."""
        while self.plan.capacity < slots:
            self.plan.capacity *= 2
        pool = self.plan.pool
        if pool.buffer is not None and pool.buffer.shape[3] < slots:
            pooled = [
                layer for layer in self.layers if type(layer) is SlotLayer and layer.is_pooled
            ]
            pool.grow(self.plan.capacity)
            for layer in pooled:
                assert layer.pool_index is not None
                layer.keys, layer.values = pool.parts[layer.pool_index : layer.pool_index + 2]

    def _slot_layers_in_use(self) -> list[SlotLayer]:
        return [one for one in self.layers if isinstance(one, SlotLayer) and one.is_initialized]

    def move(self, source: Tensor, target: Tensor) -> None:  # (B, n) slots each, or (n,) of one row
        """Copy `source[b]` to `target[b]` in every attention layer; pad rows with self-moves."""
        pool = self.plan.pool.buffer
        if pool is not None:  # (2 layers, B, heads, capacity, width)
            old, new = (one.to(pool.device) for one in (source, target))
            if source.dim() == 1:
                pool.index_copy_(3, new, pool.index_select(3, old))
            else:
                at = torch.arange(len(source), device=pool.device)[:, None]
                pool[:, at, :, new] = pool[:, at, :, old]
        single = [one for one in self._slot_layers_in_use() if not one.is_pooled]
        if single:
            source, target = (one.view(-1, one.shape[-1]) for one in (source, target))
            rows = torch.arange(len(source), device=source.device)[:, None]
            for layer in single:
                layer.move(rows, source, target)

    def snapshot(self) -> list[State]:
        """Copies of all states outside slots."""
        return [copy_state(layer) for layer in self.stateful]

    def restore(self, snapshot: Sequence[State]) -> None:
        """Restore the states of a snapshot."""
        for layer, state in zip(self.stateful, snapshot, strict=True):
            restore_state(layer, state)

    def row(self, config: Any, index: int) -> SlotCache:
        """A cache of one row, with its current contents."""
        twin = SlotCache(config, self.plan.capacity)
        twin.restore(self.snapshot())
        for mine, layer in zip(self.layers, twin.layers, strict=True):
            if isinstance(mine, SlotLayer):
                layer.copy_rows(mine, slice(index, index + 1))
            if _has_state(mine):
                layer.reorder_cache(torch.tensor([index]))
        return twin

    @staticmethod
    def stack(config: Any, caches: Sequence[SlotCache], lengths: Sequence[int]) -> SlotCache:
        """Stack the rows of several caches, for attention layers only.

        The first `lengths[i]` slots of cache i are used; all end at slot max(lengths).
        """
        stop = max(lengths)
        both = SlotCache(config, max(cache.plan.capacity for cache in caches))
        for index, layer in enumerate(both.layers):
            parts = [cache.layers[index] for cache in caches]
            if not isinstance(layer, SlotLayer):
                continue
            names = parts[0].buffer_names()
            found = {name: [getattr(part, name) for part in parts] for name in names}
            like = [torch.cat([one[:, :, :1] for one in buffers]) for buffers in found.values()]
            if names == ["keys", "values"]:
                layer.allocate_states(*like)
            else:
                layer.allocate(**dict(zip(names, like, strict=True)))
            for name, buffers in found.items():
                first = 0
                for buffer, length in zip(buffers, lengths, strict=True):
                    own = getattr(layer, name)[first : first + len(buffer)]
                    own[:, :, stop - length : stop] = buffer[:, :, :length]
                    first += len(buffer)
        return both

    def bytes(self, slots: int | None = None) -> int:
        """Bytes of the buffers, or of their first `slots`."""
        tensors = [
            getattr(layer, name)
            for layer in self.layers
            if isinstance(layer, SlotLayer)
            for name in layer.buffer_names()
        ]
        parts = [tensor if slots is None else tensor[:, :, :slots] for tensor in tensors]
        return sum(part.numel() * part.element_size() for part in parts)


def cross_attention_layers(config: Any) -> list[int]:
    """Decoder layers that attend to images only and are skipped without one (Mllama).

    `config` is a text configuration, which may name layers that do not exist.
    """
    named = getattr(config, "cross_attention_layers", None) or ()
    return [at for at in named if at < int(config.num_hidden_layers)]


def last_position_of(config: Any) -> int | None:
    """The last index of a position embedding; None if there is no limit, as with RoPE or XLNet."""
    if getattr(config, "rope_parameters", None) is not None:
        return None
    size = getattr(config, "max_target_positions", None)
    size = getattr(config, "max_position_embeddings", None) if size is None else size
    return None if size is None or int(size) < 1 else int(size) - 1  # XLNet says -1


def windows_of(config: Any) -> tuple[int, ...]:
    """Window sizes of a text configuration, by field name."""
    return tuple({v for n, v in vars(config).items() if _WINDOW.search(n) and type(v) is int and v})


_WINDOW = re.compile("^(?!.*(layer|pattern)).*(window|attention_chunk)")


def make_layers(config: Any) -> list[Any]:
    """The cache layers of transformers. Raises ValueError for a class that cannot be copied."""
    text = config.get_text_config(decoder=True)
    try:
        layers = list(DynamicCache(config=config).layers)
    except AttributeError as error:  # a composite configuration without a layer count
        raise ValueError(
            f"{type(text).__name__} does not define its cache layers ({error}); use plain decoding "
            "for this model"
        ) from error
    for index, layer in enumerate(layers):
        if type(layer) not in _SLOTTED:
            try:
                copy_state(layer)
            except ValueError as error:
                raise ValueError(
                    f"layer {index} of {type(text).__name__} cannot be rolled back: {error}; use "
                    "plain decoding for this model"
                ) from error
    return layers


def _has_state(layer: Any) -> bool:
    """Whether a layer holds states outside slots."""
    is_slots_only = isinstance(layer, SlotLayer) and not isinstance(layer, StatefulSlotLayer)
    return not is_slots_only and not isinstance(layer, DummyLayer)


def copy_state(layer: Any) -> State:
    """Copy the state of a layer. Raises ValueError for values of other types."""
    held = held_state(layer).items()
    return {name: _copy_value(value, f"{type(layer).__name__}.{name}") for name, value in held}


def held_state(layer: Any) -> State:
    """The state of a layer itself, not a copy."""
    held = dict(vars(layer))
    if isinstance(layer, SlotLayer):
        held = {name: value for name, value in held.items() if name not in _SLOTS}
    return held


def repeat_state(state: State, rows: int) -> State:
    """Copies of the state of one row for several rows."""
    return {name: _repeat_value(value, rows) for name, value in state.items()}


def _repeat_value(value: Any, rows: int) -> Any:
    if isinstance(value, dict):
        return {key: _repeat_value(one, rows) for key, one in value.items()}
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value  # a counter or a setting
    return value.repeat(rows, *[1] * (value.dim() - 1))


def restore_state(layer: Any, state: State) -> None:
    """Restore the state of a layer; tensors in place, as they may have static addresses."""
    for name, saved in state.items():
        setattr(layer, name, _restore_value(vars(layer).get(name), saved))


def join_states(states: Sequence[State]) -> State:
    """Join the states of single rows into that of a batch."""
    if len(states) == 1:
        return states[0]
    return {name: _join_values([state[name] for state in states]) for name in states[0]}


def _join_values(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _join_values([value[key] for value in values]) for key in first}
    is_counter = not isinstance(first, Tensor) or first.dim() < 2
    return first if is_counter else torch.cat(list(values))


def check_takes_cache(model: Any) -> None:
    """Check that a model takes a cache. Raises ValueError.

    A forward with any keyword arguments is checked at the first request.
    """
    names = _hf.forward_names(model)
    if "kwargs" not in names and "input_ids" in names and _hf.cache_name(model) not in names:
        raise ValueError(
            f"{type(model).__name__} takes no past_key_values, so what it has read cannot be "
            "rolled back behind a rejected draft; use model.generate() for this model"
        )


def check_keeps_cache(model: Any) -> None:
    """Refuse a model in training with gradient checkpointing, which caches nothing.

    Raises ValueError.
    """
    inner = _hf.unwrap_compiled(model)
    if inner.training and getattr(inner, "is_gradient_checkpointing", False):
        raise ValueError(
            f"{type(inner).__name__} is in training with gradient checkpointing, which keeps no "
            "keys and values; call model.eval() before generating"
        )


def _copy_value(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy_value(one, name) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy_value(one, name) for one in value)
    if isinstance(value, _PLAIN):
        return value
    raise ValueError(
        f"{name} is a {type(value).__name__}, which cannot be copied and restored after a rejected "
        "draft"
    )


def _restore_value(now: Any, saved: Any) -> Any:
    """A copy of the saved value, in place where the current one has its shape."""
    if isinstance(saved, Tensor):
        if isinstance(now, Tensor) and now.shape == saved.shape and now.dtype == saved.dtype:
            return now.copy_(saved)
        return saved.clone()
    if isinstance(saved, dict):
        before = now if isinstance(now, dict) else {}
        return {key: _restore_value(before.get(key), one) for key, one in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_restore_value(None, one) for one in saved)
    return saved
