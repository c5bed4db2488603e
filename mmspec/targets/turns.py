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
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from mmspec import _hf
from mmspec.targets.cache import SlotCache, SlotLayer, copy_states

_READABLE = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
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
    strange = [layer for layer in cache.layers if not _is_readable(layer)]
    if strange or cache.offloading:
        what = "offloads its layers" if not strange else f"has a {type(strange[0]).__name__}"
        raise ValueError(
            f"past_key_values {what}; its keys and values are not at hand as the model made them, "
            f"so no draft can be verified against them; {_FRESH}"
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
        if isinstance(own, LinearAttentionLayer) != isinstance(layer, LinearAttentionLayer):
            raise ValueError(
                f"past_key_values has a {type(layer).__name__} in layer {index}, where the model "
                f"keeps a {type(own).__name__}; {_FRESH}"
            )
        keys = layer.keys if isinstance(layer, _READABLE) else None
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
        if isinstance(own, LinearAttentionLayer):
            copy_states([layer], own)
        elif isinstance(own, SlotLayer):
            held = min(past.length, layer.keys.shape[-2])
            needed = past.length if own.window is None else min(past.length, own.window - 1)
            if held < needed:
                raise ValueError(
                    f"layer {index} of past_key_values holds the last {held} of {past.length} "
                    f"tokens, and the model attends to {needed}; {_FRESH}"
                )
            keys, values = layer.keys[:, :, :held], layer.values[:, :, :held]
            own.lazy_initialization(keys, values)
            own.keys[:, :, past.length - held : past.length] = keys
            own.values[:, :, past.length - held : past.length] = values


def release(rows: Sequence[SlotCache], config: Any, cache: Cache | None, stop: int) -> Cache:
    """Write slots up to `stop` behind what `cache` holds, of all rows; into a new one for None.

    `rows` are the slots of the batch, or of each row. The cache is left as a model would leave it.
    """
    cache = DynamicCache(config=config) if cache is None else cache
    start = _hf.held(cache)
    for index, layers in enumerate(zip(*(slots.layers for slots in rows), strict=True)):
        if isinstance(layers[0], LinearAttentionLayer):
            found: Any = cache.layers[index]
            copy_states(layers, found)
        elif isinstance(layers[0], SlotLayer):
            keys = torch.cat([layer.keys[:, :, start:stop] for layer in layers])
            values = torch.cat([layer.values[:, :, start:stop] for layer in layers])
            cache.update(keys, values, index)
    return cache


def _is_readable(layer: Any) -> bool:
    return type(layer) in (*_READABLE, LinearAttentionLayer) or type(layer).__name__ == "DummyLayer"
