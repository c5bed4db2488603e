"""Caches of transformers that outlive a request: where a turn begins, and what it leaves.

A conversation over several turns keeps one cache, filled by `generate()` or by us. We read from it
into slots of our own, which can roll back, and write the new tokens into it when the turn is over:
it then holds what `generate()` would have left, all tokens but the last one.

    turn 1    prompt  answer           cache: prompt answe
    turn 2    prompt  answer  question answer     read anew: "r question"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

from mmspec import _hf
from mmspec.targets.cache import SlotCache, bring_back, state_of, together
from mmspec.targets.slots import IndexedSlotLayer, SlotLayer, StatefulSlotLayer

# what each of our layers takes up and writes into; any other layer takes up its like
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


@dataclass(frozen=True)
class EarlierTurns:
    """What an earlier turn left, for a request to go on from.

    With `is_told` the request's `input_ids` begin with its tokens; else they are the new ones only,
    and what stood before is known to the model alone.
    """

    cache: Cache
    length: int  # slots in it
    is_told: bool
    mask: Tensor | None = None  # (B, length) what is seen of it, where that is not told; None = all

    @classmethod
    def of(cls, cache: Cache, inputs: Mapping[str, Any]) -> EarlierTurns:
        """Read a request as `generate()` does.

        A mask of as many columns as `input_ids` (or none) says that these are the whole
        conversation, as embeddings always are; a longer one, that they are its end. Raises
        ValueError where neither leaves a token to read.
        """
        length = _hf.held(cache)
        embeds, mask = inputs.get("inputs_embeds"), inputs.get("attention_mask")
        given = int((inputs["input_ids"] if embeds is None else embeds).shape[1])
        columns = None if mask is None else int(mask.shape[1])
        if columns not in (None, given, length + given if embeds is None else None):
            raise ValueError(
                f"attention_mask has {columns} columns for {given} input_ids behind a cache of "
                f"{length} tokens; give one of {given} with the whole conversation in input_ids, "
                f"or of {length + given} with its new tokens only"
            )
        if columns in (None, given) and given <= length:
            raise ValueError(
                f"past_key_values holds {length} tokens and the request has {given}, so nothing "
                "new is there to read; pass the whole conversation as input_ids, or its new tokens "
                "with an attention_mask over all"
            )
        told = columns in (None, given)
        return cls(cache, length, told, None if told or mask is None else mask[:, :length])


def whole_mask(inputs: Mapping[str, Any], past: EarlierTurns | None) -> Tensor | None:
    """The mask over all slots, earlier turns included; None where nothing is hidden."""
    mask: Tensor | None = inputs.get("attention_mask")
    if past is None or past.is_told or (mask is None and past.mask is None):
        return mask
    ids = inputs["input_ids"]
    before = past.mask if past.mask is not None else ids.new_ones(len(ids), past.length)
    return torch.cat((before, torch.ones_like(ids) if mask is None else mask), 1)


def prompt_slots(inputs: Mapping[str, Any], past: EarlierTurns | None) -> int:
    """Slots that a prompt takes, earlier turns included."""
    embeds = inputs.get("inputs_embeds")
    given = int((inputs["input_ids"] if embeds is None else embeds).shape[1])
    return given if past is None or past.is_told else past.length + given


def unread(inputs: Mapping[str, Any], past: EarlierTurns | None) -> Mapping[str, Any]:
    """The request with those ids alone that are in no cache yet."""
    ids = inputs.get("input_ids")
    if past is None or not past.is_told or ids is None:
        return inputs
    return {**inputs, "input_ids": ids[:, past.length :]}


def check_cache(cache: Any, slots: SlotCache, batch: int) -> None:
    """Refuse a cache that cannot be read, or is another request's. Raises ValueError."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, not a Cache of transformers; {_FRESH}"
        )
    if cache.offloading:
        raise ValueError(
            "past_key_values offloads its layers, so its keys and values are not at hand to verify "
            f"drafts against; {_FRESH}"
        )
    if _hf.is_uncounted(cache):
        raise ValueError(
            "past_key_values holds states of recurrent layers only, which do not tell how many "
            f"tokens they have read; {_FRESH}"
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


def check_room(cache: Cache, most: int) -> None:
    """Refuse a cache that may not hold the `most` tokens of a turn. Raises ValueError."""
    for layer in cache.layers:
        if type(layer) is StaticLayer and layer.max_cache_len < most:
            raise ValueError(
                f"past_key_values has room for {layer.max_cache_len} tokens, and this turn may "
                f"need {most}; give max_cache_len={most}, or a smaller max_new_tokens"
            )


def load(past: EarlierTurns, slots: SlotCache) -> None:
    """Copy what a cache holds into slots [0, past.length); a window's last slots, of a window."""
    layers: list[Any] = past.cache.layers
    for index, (layer, own) in enumerate(zip(layers, slots.layers, strict=True)):
        if not isinstance(own, SlotLayer):
            bring_back(own, state_of(layer))
            continue
        if own.is_crossed:
            if layer.keys is not None:  # there was a picture
                own.update(layer.keys, layer.values)
            continue
        held = min(past.length, layer.keys.shape[-2])
        needed = past.length if own.window is None else min(past.length, own.window - 1)
        if held < needed:
            raise ValueError(
                f"layer {index} of past_key_values holds the last {held} of {past.length} "
                f"tokens, and the model attends to {needed}; {_FRESH}"
            )
        for name, states in _slotted(layer, own).items():
            states = states[:, :, :held]
            own.allocate(**{name: states})
            getattr(own, name)[:, :, past.length - held : past.length] = states
        if isinstance(own, StatefulSlotLayer):
            bring_back(own, _states(layer))


def release(rows: Sequence[SlotCache], config: Any, cache: Cache | None, stop: int) -> Cache:
    """Write slots up to `stop` behind what `cache` holds, of all rows; into a new one for None.

    `rows` are the slots of the batch, or of each row. The cache is left as a model would leave it.
    """
    cache = DynamicCache(config=config) if cache is None else cache
    start = _hf.held(cache)
    for index, layers in enumerate(zip(*(slots.layers for slots in rows), strict=True)):
        own, found = layers[0], cast(Any, cache.layers)
        if not isinstance(own, SlotLayer):
            bring_back(found[index], together([state_of(layer) for layer in layers]))
            continue
        new = {
            name: torch.cat([getattr(layer, name)[:, :, start:stop] for layer in layers])
            for name in own.written()
        }
        if new:
            cache.update(new["keys"], new["values"], index)
        elif own.is_crossed and own.is_initialized and not start:
            keys, values = (torch.cat([getattr(x, n) for x in layers]) for n in ("keys", "values"))
            cache.update(keys, values, index)
        if "index" in new:
            cache.update_indexer(new["index"][:, 0], index)
        if "places" in new:
            before, more = found[index].indexer_position_ids, new["places"][:, 0].permute(2, 0, 1)
            both = more if before is None else torch.cat((before, more), -1)
            found[index].indexer_position_ids = both
        if isinstance(own, StatefulSlotLayer):
            bring_back(found[index], together([state_of(layer) for layer in layers]))
    return cache


def _slotted(layer: Any, own: SlotLayer) -> dict[str, Tensor]:  # (B, heads, L, width) each
    """What a layer of transformers holds, by the names of our buffers."""
    found: dict[str, Tensor] = {"keys": layer.keys, "values": layer.values}
    if isinstance(own, IndexedSlotLayer):
        if layer.indexer_keys is not None:
            found["index"] = layer.indexer_keys[:, None]
        if layer.indexer_position_ids is not None:
            found["places"] = layer.indexer_position_ids.permute(1, 2, 0)[:, None]
    return found


def _states(layer: Any) -> dict[str, Any]:
    """The convolution and recurrent states of a layer that attends, too."""
    names = vars(LinearAttentionLayer())
    return {name: value for name, value in state_of(layer).items() if name in names}
