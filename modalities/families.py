"""Which family a model belongs to, and the backbone that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmspec import _hf
from mmspec.modalities.image import families as image
from mmspec.modalities.vlm import families as vlm
from mmspec.modalities.vlm import recognisers as speech
from mmspec.models.loading import is_pipeline
from mmspec.targets.backbone import Backbone
from mmspec.targets.encoder_decoder import EncoderDecoder
from mmspec.targets.family import Family
from mmspec.targets.reader import Reader

_PLAIN_HEADS = frozenset(
    ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "smollm3")
)  # language models whose logits are head(decoder(...)) with nothing behind


def family(model: Any) -> Family:
    """The family of a model by its config's `model_type`; plain text for language models.

    Raises ValueError for a multimodal model that is not listed: its positions and placeholders
    would only be guessed.
    """
    kind = model.config.model_type
    known = {**vlm.FAMILIES, **speech.FAMILIES, **image.FAMILIES}
    if kind in known and (kind not in image.FAMILIES or image.draws(model)):
        return known[kind]
    listed = getattr(model, "input_modalities", ("text",))
    takes = sorted({listed} if isinstance(listed, str) else set(listed))
    pixels = "pixel_values" in _hf.forward_names(model)
    composite = model.config.get_text_config(decoder=True) is not model.config
    if (
        pixels or (composite and takes != ["text"]) or "audio" in takes
    ):  # a text tower may list them all
        raise ValueError(
            f"{type(model).__name__} ({kind}) takes {takes}, but its family is not "
            f"described; known: {', '.join(sorted(known))}. Add a Family on the modalities shelf"
        )
    return Family(direct=kind in _PLAIN_HEADS)


def backbone(model: Any) -> Reader:
    """What reads a model: a `Backbone`, or what has its calls.

    Raises ValueError for what cannot work, before any forward.
    """
    described = family(model)
    reader: Reader
    if described.draws:
        reader = image.backbone(model)
    elif getattr(model.config, "is_encoder_decoder", False):
        reader = EncoderDecoder(model, described)
    else:
        reader = Backbone(model, described)
    reader.reader_maker = backbone
    return reader


def surface(model: Any) -> Callable[..., Any] | None:
    """What `accelerate` hands a model on to that decodes other things than token ids."""
    if is_pipeline(model):
        from mmspec.api import accelerate

        return accelerate
    if getattr(getattr(model, "config", None), "model_type", None) == "mar":
        from mmspec.api import accelerate

        return accelerate
    return None
