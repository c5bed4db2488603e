"""Which family a model of token ids belongs to, and what reads it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mmspec import _hf
from mmspec.targets.backbone import Backbone
from mmspec.targets.encoder_decoder import EncoderDecoder
from mmspec.targets.family import Family
from mmspec.targets.reader import Reader

_PLAIN_HEADS = frozenset(
    ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "smollm3")
)  # language models whose logits are head(decoder(...)) with nothing behind


# how arguments that carry pictures or sounds are called, and ids that stand for them
_MEDIA = ("pixel_values", "input_features", "input_values", "audio_values")
_MARKS = (
    *("image_token_id", "image_token_index", "video_token_id", "video_token_index"),
    *("audio_token_id", "audio_token_index"),
)


def family(model: Any, families: Mapping[str, Family]) -> Family:
    """The family of a model by its config's `model_type`; else what the model itself tells.

    A model that is not listed is read by its whole forward, and checked on its first request.
    """
    kind = model.config.model_type
    if kind in families:
        return families[kind]
    composite = model.config.get_text_config(decoder=True) is not model.config
    media = tuple(sorted(name for name in _hf.forward_names(model) if name.startswith(_MEDIA)))
    if not media and not composite:
        return Family(direct=kind in _PLAIN_HEADS)
    marks = tuple(name for name in _MARKS if getattr(model.config, name, None) is not None)
    return Family(kind, media, placeholders=marks)


def reader(model: Any, families: Mapping[str, Family]) -> Reader:
    """What reads a model: a `Backbone`, or what has its calls.

    Raises ValueError for what cannot work, before any forward.
    """
    described = family(model, families)
    made: Reader
    if getattr(model.config, "is_encoder_decoder", False):
        made = EncoderDecoder(model, described)
    else:
        made = Backbone(model, described)
    made.reader_maker = partial(reader, families=families)
    return made
