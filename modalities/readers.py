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


def family(model: Any, families: Mapping[str, Family]) -> Family:
    """The family of a model by its config's `model_type`; plain text for language models.

    Raises ValueError for a multimodal model that is not listed: its positions and placeholders
    would only be guessed.
    """
    kind = model.config.model_type
    if kind in families:
        return families[kind]
    listed = getattr(model, "input_modalities", ("text",))
    takes = sorted({listed} if isinstance(listed, str) else set(listed))
    pixels = "pixel_values" in _hf.forward_names(model)
    composite = model.config.get_text_config(decoder=True) is not model.config
    pictured = composite and takes != ["text"]  # a text tower may list them all
    if pixels or pictured or "audio" in takes:
        raise ValueError(
            f"{type(model).__name__} ({kind}) takes {takes}, but its family is not "
            f"described; known: {', '.join(sorted(families))}. Add a Family on the modalities shelf"
        )
    return Family(direct=kind in _PLAIN_HEADS)


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
