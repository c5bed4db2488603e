"""Check whether a model reads a later turn of a conversation as its own `generate()` does.

A class may read several tokens after a rolling cache otherwise than one after the other (Moshi
masks them without its window). On the first request after `past_key_values` of every class,
configuration and shape, the new turn is also read by the model itself, with a copy of the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from mmspec import _hf
from mmspec.targets.cache import windows_of
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.check import Key, configuration_key
from mmspec.targets.readers.rounding import rounding_margin, score_difference
from mmspec.targets.tokens.turns import EarlierTurns, count_prompt_slots, full_attention_mask

# shapes that agreed; global, as models have shorter lifetimes than the process
_agreed: set[Key] = set()


def check_turn(
    reader: Backbone, inputs: Mapping[str, Any], past: EarlierTurns, logits: Tensor
) -> None:
    """Compare the scores after a new turn, `logits` (B, V), with the model's own.

    Costs a copy of the cache and one forward over the turn, once per class, configuration and
    shape. Raises ValueError for a difference.
    """
    if (key := _key(reader, inputs, past, len(logits))) in _agreed:
        return
    given = {**inputs, "attention_mask": full_attention_mask(inputs, past)}
    try:
        cache = copy.deepcopy(past.cache)
        prepared = _hf.prepare_prefill_inputs(reader.model, given, cache, past.includes_cached)
        own = reader.model(**prepared, return_dict=True).logits[:, -1]
    except torch.OutOfMemoryError:  # the copy is not part of the request
        return
    apart = float(score_difference(logits, reader.divide_logits(own)))
    bound = rounding_margin(reader.model.dtype)
    if apart > bound:
        raise ValueError(
            f"{type(reader.model).__name__} scores a new turn after past_key_values otherwise than "
            f"generate() does (by {apart:.2g} of the spread of its scores, where {bound:.2g} is "
            "rounding), so wrong tokens would follow; drop past_key_values and give the whole "
            "conversation, or use model.generate()"
        )
    _agreed.add(key)


def _key(reader: Backbone, inputs: Mapping[str, Any], past: EarlierTurns, batch: int) -> Key:
    model, mask = reader.model, full_attention_mask(inputs, past)
    new, windows = count_prompt_slots(inputs, past) - past.length, windows_of(reader.config)
    rolled = tuple((past.length >= size, new >= size) for size in sorted(windows))
    place = (str(reader.config._attn_implementation), model.dtype, reader.device.type)
    names = tuple(sorted(name for name, value in inputs.items() if value is not None))
    shape = (names, batch > 1, mask is not None and not bool(mask.all()))
    turn = (type(past.cache), past.includes_cached, new > 1, rolled)
    own = (type(model), transformers.__version__, configuration_key(reader))
    return (*own, *place, *shape, *turn)
