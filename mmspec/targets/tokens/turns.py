"""Multi-turn conversations: read and write a transformers cache that outlives a request.

A conversation over several turns keeps one cache, filled by `generate()` or by mmspec. Its contents
are copied into slots, which can roll back, and the new tokens are appended to it at the end of the
turn: it then holds the same as after `generate()`, all tokens but the last one.

    turn 1    prompt  reply            cache: prompt repl
    turn 2    prompt  reply  question reply     newly read: "y question"
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from mmspec import _hf_cache
from mmspec.targets.cache import SlotCache, copy_state, join_states, restore_state
from mmspec.targets.slots import IndexedSlotLayer, SlotLayer, StatefulSlotLayer

# the layers that each slot layer reads and writes; any other layer reads its own type
_READABLE: dict[type, tuple[type, ...]] = {
    SlotLayer: (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer),
    IndexedSlotLayer: (DynamicIndexedLayer, StaticIndexedLayer),
    StatefulSlotLayer: (
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        LinearAttentionAndStaticFullAttentionLayer,
        LinearAttentionAndStaticSlidingWindowAttentionLayer,
    ),
}
_FRESH = "give past_key_values=DynamicCache(config=model.config)"


KEPT = "mmspec_features"  # attribute of a cache


@dataclass(frozen=True)
class KeptFeatures:
    """What a head needs of the tokens in a cache: kept with it, as it cannot be read from it."""

    states: Mapping[str, Tensor]  # (B, L, W) features of the target by name
    embeds: Tensor  # (B, L, D)
    positions: Tensor | None  # (B, L), or (axes, B, L) with M-RoPE

    @classmethod
    def of_cache(cls, cache: Cache, length: int) -> KeptFeatures | None:
        """Those of the first `length` slots; None where the cache has none, or fewer."""
        found = vars(cache).get(KEPT)
        if found is None or found.embeds.shape[1] < length:
            return None
        positions = None if found.positions is None else found.positions[..., :length]
        states = {name: one[:, :length] for name, one in found.states.items()}
        return cls(states, found.embeds[:, :length], positions)

    def prepend_to(self, offer: Mapping[str, Any]) -> dict[str, Any]:
        """The features of a whole conversation, from those of its last turn."""
        whole = {**self.states, "embeds": self.embeds}
        found = {n: torch.cat((one, offer[n]), 1) for n, one in whole.items() if n in offer}
        if self.positions is not None and offer.get("positions") is not None:
            shape = (*self.positions.shape[:-1], -1)
            both = (self.positions, offer["positions"].expand(shape))
            found["positions"] = torch.cat(both, -1)
        return {**offer, **found}


@dataclass(frozen=True)
class EarlierTurns:
    """The cache of earlier turns that a request continues.

    With `is_told` the request's `input_ids` begin with the cached tokens; else they are
    the new ones only.
    """

    cache: Cache
    length: int  # slots in it
    includes_cached: bool
    mask: Tensor | None = None  # (B, length) attention mask of new tokens only; None = all
    features: KeptFeatures | None = None  # of the cached tokens

    def check_features(self, name: str, required: Collection[str], has_images: bool) -> None:
        """Refuse features of the whole prompt that were not kept. Raises ValueError.

        `name` is the drafter's. With `has_images` its head needs the ids of all tokens.
        """
        kept = {} if self.features is None else self.features.states
        missing = sorted(set(required) - set(kept))
        if missing:
            raise ValueError(
                f"{name} needs features of the whole prompt ({', '.join(missing)}), but "
                "past_key_values already holds a part of it; give the cache of a turn of this "
                "recipe, drop past_key_values, or use a recipe with a draft model or a lookup"
            )
        if required and has_images and not self.includes_cached:
            raise ValueError(
                f"{name} distinguishes images from text by the ids of all tokens; give the whole "
                "conversation as input_ids, with an attention_mask of that length"
            )

    @classmethod
    def from_request(cls, cache: Cache, inputs: Mapping[str, Any]) -> EarlierTurns:
        """Interpret a request as `generate()` does.

        With an attention mask as long as `input_ids` (or none) these are the whole conversation, as
        embeddings always are; with a longer one, they are its end. Raises ValueError if no token is
        left to read.
        """
        length = _hf_cache.cached_length(cache)
        embeds, mask = inputs.get("inputs_embeds"), inputs.get("attention_mask")
        given = int((inputs["input_ids"] if embeds is None else embeds).shape[1])
        columns = None if mask is None else int(mask.shape[1])
        if columns not in (None, given, length + given if embeds is None else None):
            raise ValueError(
                f"attention_mask has {columns} columns for {given} input_ids after a cache of "
                f"{length} tokens; give one of {given} with the whole conversation in input_ids, "
                f"or of {length + given} with its new tokens only"
            )
        if columns in (None, given) and given <= length:
            raise ValueError(
                f"past_key_values holds {length} tokens and the request has {given}, so there is "
                "nothing new to read; pass the whole conversation as input_ids, or its new tokens "
                "with an attention_mask over all"
            )
        includes_cached = columns in (None, given)
        return cls(
            cache,
            length,
            includes_cached,
            None if includes_cached or mask is None else mask[:, :length],
            KeptFeatures.of_cache(cache, length),
        )


def full_attention_mask(inputs: Mapping[str, Any], past: EarlierTurns | None) -> Tensor | None:
    """The mask over all slots, earlier turns included; None = nothing is masked."""
    mask: Tensor | None = inputs.get("attention_mask")
    if past is None or past.includes_cached or (mask is None and past.mask is None):
        return mask
    ids = inputs["input_ids"]
    before = past.mask if past.mask is not None else ids.new_ones(len(ids), past.length)
    return torch.cat((before, torch.ones_like(ids) if mask is None else mask), 1)


def count_prompt_slots(inputs: Mapping[str, Any], past: EarlierTurns | None) -> int:
    """Count the slots of a prompt, earlier turns included."""
    embeds = inputs.get("inputs_embeds")
    given = int((inputs["input_ids"] if embeds is None else embeds).shape[1])
    return given if past is None or past.includes_cached else past.length + given


def drop_cached_ids(inputs: Mapping[str, Any], past: EarlierTurns | None) -> Mapping[str, Any]:
    """The request with only the ids that are not cached yet."""
    ids = inputs.get("input_ids")
    if past is None or not past.includes_cached or ids is None:
        return inputs
    return {**inputs, "input_ids": ids[:, past.length :]}


def check_cache(cache: Any, slots: SlotCache, batch: int) -> None:
    """Check that a cache can be read and belongs to the request. Raises ValueError."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, not a Cache of transformers; {_FRESH}"
        )
    if cache.offloading:
        raise ValueError(
            "past_key_values offloads its layers, so its keys and values are not available for "
            f"verification; {_FRESH}"
        )
    if _hf_cache.has_unknown_length(cache):
        raise ValueError(
            "past_key_values holds states of recurrent layers only, whose number of tokens is "
            f"unknown; {_FRESH}"
        )
    if cache.layers and len(cache.layers) != len(slots.layers):
        raise ValueError(
            f"past_key_values has {len(cache.layers)} layers and the model {len(slots.layers)}: it "
            f"is another model's; {_FRESH}"
        )
    for index, (layer, own) in enumerate(zip(cache.layers, slots.layers, strict=False)):
        kinds = _READABLE.get(type(own), (type(own),))
        if type(layer) not in kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(
                f"past_key_values has a {type(layer).__name__} in layer {index}, where the model "
                f"can be verified against a {wanted} only; {_FRESH}"
            )
        keys = layer.keys if isinstance(layer, CacheLayerMixin) else None
        if keys is not None and keys.numel() and len(keys) != batch:
            raise ValueError(
                f"past_key_values holds {len(keys)} rows and the request has {batch}; give one "
                "conversation per row"
            )


def check_capacity(cache: Cache, max_tokens: int) -> None:
    """Check that a cache can hold the `max_tokens` of a turn. Raises ValueError."""
    for layer in cache.layers:
        if type(layer) is StaticLayer and layer.max_cache_len < max_tokens:
            raise ValueError(
                f"past_key_values has room for {layer.max_cache_len} tokens, and this turn may "
                f"need {max_tokens}; give max_cache_len={max_tokens}, or a smaller max_new_tokens"
            )


def load_cache(past: EarlierTurns, slots: SlotCache) -> None:
    """Copy a cache into slots [0, past.length); of a sliding window, its last slots."""
    layers: list[Any] = past.cache.layers
    for index, (layer, own) in enumerate(zip(layers, slots.layers, strict=True)):
        if not isinstance(own, SlotLayer):
            restore_state(own, copy_state(layer))
            continue
        if own.is_cross_attention:
            if layer.keys is not None:  # there was an image
                own.update(layer.keys, layer.values)
            continue
        held = min(past.length, layer.keys.shape[-2])
        needed = past.length if own.window is None else min(past.length, own.window - 1)
        if held < needed:
            raise ValueError(
                f"layer {index} of past_key_values holds the last {held} of {past.length} "
                f"tokens, and the model attends to {needed}; {_FRESH}"
            )
        for name, states in _buffer_states(layer, own).items():
            states = states[:, :, :held]
            own.allocate(**{name: states})
            getattr(own, name)[:, :, past.length - held : past.length] = states
        if isinstance(own, StatefulSlotLayer):
            restore_state(own, _states(layer))


def write_cache(rows: Sequence[SlotCache], config: Any, cache: Cache | None, stop: int) -> Cache:
    """Append the slots up to `stop` of all rows to `cache`, or to a new one for None.

    `rows` are the slots of the batch, or of each row. The cache is as after the model's own steps.
    """
    cache = DynamicCache(config=config) if cache is None else cache
    start = _hf_cache.cached_length(cache)
    for index, layers in enumerate(zip(*(slots.layers for slots in rows), strict=True)):
        own, found = layers[0], cast(Any, cache.layers)
        if not isinstance(own, SlotLayer):
            restore_state(found[index], join_states([copy_state(layer) for layer in layers]))
            continue
        new = {
            name: torch.cat([getattr(layer, name)[:, :, start:stop] for layer in layers])
            for name in own.buffer_names()
        }
        if new:
            cache.update(new["keys"], new["values"], index)
        elif own.is_cross_attention and own.is_initialized and not start:
            keys, values = (torch.cat([getattr(x, n) for x in layers]) for n in ("keys", "values"))
            cache.update(keys, values, index)
        if "index" in new:
            cache.update_indexer(new["index"][:, 0], index)
        if "places" in new:
            before, more = found[index].indexer_position_ids, new["places"][:, 0].permute(2, 0, 1)
            both = more if before is None else torch.cat((before, more), -1)
            found[index].indexer_position_ids = both
        if isinstance(own, StatefulSlotLayer):
            restore_state(found[index], join_states([copy_state(layer) for layer in layers]))
    return cache


def _buffer_states(layer: Any, own: SlotLayer) -> dict[str, Tensor]:  # (B, heads, L, width) each
    """The states of a transformers layer, by the names of the slot buffers."""
    found: dict[str, Tensor] = {"keys": layer.keys, "values": layer.values}
    if isinstance(own, IndexedSlotLayer):
        if layer.indexer_keys is not None:
            found["index"] = layer.indexer_keys[:, None]
        if layer.indexer_position_ids is not None:
            found["places"] = layer.indexer_position_ids.permute(1, 2, 0)[:, None]
    return found


def _states(layer: Any) -> dict[str, Any]:
    """The convolution and recurrent states of a layer with attention."""
    names = vars(LinearAttentionLayer())
    return {name: value for name, value in copy_state(layer).items() if name in names}
