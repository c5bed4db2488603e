"""Key/value memory made for speculation: write anywhere, forget for free, keep a path of a tree.

Every attention layer owns one buffer (B, heads, capacity, width). Rows write at their own slots;
what was rejected is simply not counted any more, and is overwritten later. Nothing is ever
concatenated.

    slot        0   1   2   3   4   5   6   7
    row 0       p   p   p   a  [x   y   z]  .      kept 4, block of 3 written at 4..6
    row 1       -   p   p   a   b  [x   y   z]     one padded slot, kept 5, block at 5..7

After verification row 0 keeps x and z of a tree: z moves from slot 6 to slot 5, and `kept` becomes
6.

Recurrent, convolution, compressed, rolling and static layers overwrite what they held. A copy of
all their tensors and counters brings them back to a committed point, and what was accepted behind
it is read again.
"""

from __future__ import annotations

import copy
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
from mmspec.targets.slots import IndexedSlotLayer, SlotLayer, SlotPlan, StatefulSlotLayer

# layers of transformers, and what keeps the same so that it can be forgotten
_SLOTTED: dict[type, type[SlotLayer]] = {
    DynamicLayer: SlotLayer,
    DynamicSlidingWindowLayer: SlotLayer,
    DynamicIndexedLayer: IndexedSlotLayer,
    LinearAttentionAndFullAttentionLayer: StatefulSlotLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: StatefulSlotLayer,
}

State = dict[str, Any]
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.Size)
_SLOTS = ("plan", "window", "is_initialized", *SlotLayer.buffers)  # these forget by themselves


class SlotCache(Cache):
    """The cache object handed to a Hugging Face model; one `plan_*` call precedes every forward.

    Keys and values lie in slots. States of recurrent layers are as transformers makes them, and so
    is every layer of a model that has one of another kind (compressed, rolling, static: their masks
    and lengths belong together); `snapshot` and `restore` bring those back to a committed point.
    `can_branch` is False for them: a tree would need one state per branch. `is_slotted` tells
    whether all that attends lies in slots, so that it can be placed and masked.
    """

    def __init__(self, config: Any, capacity: int = 64) -> None:
        self.plan = SlotPlan(capacity)
        self.layers: list[Any]
        made = template(config)
        self.is_slotted = all(
            type(layer) in (*_SLOTTED, LinearAttentionLayer, DummyLayer) for layer in made
        )
        super().__init__(layers=[self._layer(layer) for layer in made])
        for index in crossed_layers(config.get_text_config(decoder=True)):
            self.layers[index].is_crossed = True
        self.stateful = [layer for layer in self.layers if _has_state(layer)]

    def _layer(self, layer: Any) -> Any:
        kind = _SLOTTED.get(type(layer)) if self.is_slotted else None
        if kind is None:
            return layer
        window = getattr(layer, "sliding_window", None)
        if kind is StatefulSlotLayer:
            return StatefulSlotLayer(self.plan, window, layer.number_of_states)
        return kind(self.plan, window)

    @property
    def can_branch(self) -> bool:
        return not self.stateful

    def emptied(self) -> SlotCache:
        """Another one of the same layers, which holds nothing; only of one that `can_branch`."""
        twin = copy.copy(self)
        twin.plan = SlotPlan(64)
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
        """Let the layers grow to so many slots, when they are next written."""
        while self.plan.capacity < slots:
            self.plan.capacity *= 2

    def move(self, source: Tensor, target: Tensor) -> None:  # (B, n) slots each
        """Copy `source[b]` to `target[b]` in every attention layer; pad rows with self-moves."""
        rows = torch.arange(source.shape[0], device=source.device)[:, None]
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.is_initialized:
                layer.move(rows, source, target)

    def snapshot(self) -> list[State]:
        """Copies of all that is kept in no slots."""
        return [state_of(layer) for layer in self.stateful]

    def restore(self, snapshot: Sequence[State]) -> None:
        """Bring that back."""
        for layer, state in zip(self.stateful, snapshot, strict=True):
            bring_back(layer, state)

    def row(self, config: Any, index: int) -> SlotCache:
        """One row's own cache, with what it holds so far."""
        twin = SlotCache(config, self.plan.capacity)
        twin.restore(self.snapshot())
        for mine, layer in zip(self.layers, twin.layers, strict=True):
            if isinstance(mine, SlotLayer):
                layer.take(mine, slice(index, index + 1))
            if _has_state(mine):
                layer.reorder_cache(torch.tensor([index]))
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
            if not isinstance(layer, SlotLayer):
                continue
            for name in parts[0].written():
                buffers = [getattr(part, name) for part in parts]
                layer.allocate(**{name: torch.cat([buffer[:, :, :1] for buffer in buffers])})
                first = 0
                for buffer, length in zip(buffers, lengths, strict=True):
                    own = getattr(layer, name)[first : first + len(buffer)]
                    own[:, :, stop - length : stop] = buffer[:, :, :length]
                    first += len(buffer)
        return both

    def bytes(self, slots: int | None = None) -> int:
        """Memory held by the buffers, or by so many slots of them."""
        tensors = [
            getattr(layer, name)
            for layer in self.layers
            if isinstance(layer, SlotLayer)
            for name in layer.written()
        ]
        parts = [tensor if slots is None else tensor[:, :, :slots] for tensor in tensors]
        return sum(part.numel() * part.element_size() for part in parts)


def crossed_layers(config: Any) -> list[int]:
    """Decoder layers that attend to pictures alone, and are left out where there is none (Mllama).

    `config` is a text configuration, which may name layers that it has not.
    """
    named = getattr(config, "cross_attention_layers", None) or ()
    return [at for at in named if at < int(config.num_hidden_layers)]


def template(config: Any) -> list[Any]:
    """The layers transformers itself would use; refuses those that cannot be copied either.

    Raises ValueError naming the layer class.
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
        if type(layer) not in _SLOTTED:
            try:
                state_of(layer)
            except ValueError as error:
                raise ValueError(
                    f"layer {index} of {type(text).__name__} cannot be rolled back: {error}; use "
                    "plain decoding for this model"
                ) from error
    return layers


def _has_state(layer: Any) -> bool:
    """Whether a layer holds what lies in no slots."""
    is_slots_only = isinstance(layer, SlotLayer) and not isinstance(layer, StatefulSlotLayer)
    return not is_slots_only and not isinstance(layer, DummyLayer)


def state_of(layer: Any) -> State:
    """A copy of all that a layer holds. Raises ValueError for what is neither tensor nor number."""
    held = vars(layer).items()
    if isinstance(layer, SlotLayer):
        held = {name: value for name, value in held if name not in _SLOTS}.items()
    return {name: _copied(value, f"{type(layer).__name__}.{name}") for name, value in held}


def bring_back(layer: Any, state: State) -> None:
    """Give a layer its state back; tensors in place, they may have static addresses."""
    for name, saved in state.items():
        setattr(layer, name, _restored(vars(layer).get(name), saved))


def together(states: Sequence[State]) -> State:
    """The states of several rows, each of one, as those of a batch."""
    if len(states) == 1:
        return states[0]
    return {name: _joined([state[name] for state in states]) for name in states[0]}


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _joined([value[key] for value in values]) for key in first}
    is_counter = not isinstance(first, Tensor) or first.dim() < 2
    return first if is_counter else torch.cat(list(values))


def takes_cache(model: Any) -> None:
    """Refuse a model without a cache by name: what it read cannot be rolled back.

    A wrapper that names no argument at all is left to the first request. Raises ValueError.
    """
    names = _hf.forward_names(model)
    if "input_ids" in names and _hf.cache_name(model) not in names:
        raise ValueError(
            f"{type(model).__name__} takes no past_key_values, so what it has read cannot be "
            "rolled back behind a rejected draft; use model.generate() for this model"
        )


def keeps_cache(model: Any) -> None:
    """Refuse a model that keeps nothing of what it reads while it learns. Raises ValueError."""
    inner = _hf.uncompiled(model)
    if inner.training and getattr(inner, "is_gradient_checkpointing", False):
        raise ValueError(
            f"{type(inner).__name__} is in training with gradient checkpointing, which keeps no "
            "keys and values; call model.eval() before generating"
        )


def _copied(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(one, name) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(one, name) for one in value)
    if isinstance(value, _PLAIN):
        return value
    raise ValueError(
        f"{name} is a {type(value).__name__}, which cannot be copied and brought back behind a "
        "rejected draft"
    )


def _restored(now: Any, saved: Any) -> Any:
    """A copy of what was saved, written over what is there now if that has its shape."""
    if isinstance(saved, Tensor):
        if isinstance(now, Tensor) and now.shape == saved.shape and now.dtype == saved.dtype:
            return now.copy_(saved)
        return saved.clone()
    if isinstance(saved, dict):
        before = now if isinstance(now, dict) else {}
        return {key: _restored(before.get(key), one) for key, one in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_restored(None, one) for one in saved)
    return saved
