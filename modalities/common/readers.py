"""Which family a model of token ids belongs to, and what reads it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.registry import check_unwrapped
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.ctc import CtcHead
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.family import Family
from mmspec.targets.readers.reader import Reader

_PLAIN_HEADS = frozenset(
    ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "smollm3")
)  # language models whose logits are head(decoder(...)) with nothing behind


# how arguments that carry pictures or sounds are called, and ids that stand for them
_MEDIA = ("pixel_values", "image_patches", "input_features", "input_values", "audio_values")
_MARKS = (
    *("image_token_id", "image_token_index", "video_token_id", "video_token_index"),
    *("audio_token_id", "audio_token_index"),
)


def _granite_frames(model: Any, inputs: Mapping[str, Any], frames: int) -> Tensor | None:
    """Frames (B, T) that are heard, to the window: `input_features_mask` counts what it gives."""
    mask = inputs.get("input_features_mask")
    if mask is None:
        return None
    window = model.config.window_size
    made = window // model.config.downsample_rate  # embeddings of a window
    heard = mask.sum(-1, keepdim=True) // made * window
    seen: Tensor = torch.arange(frames, device=mask.device) < heard
    return seen


_GRANITE_CTC = CtcHead(
    "input_features",
    lambda model: model.model.encoder,
    lambda model: model.model.encoder.out,
    _granite_frames,
)
_READ = ("input_ids", "args", "kwargs")  # one of them takes the tokens of whatever generates
# classes whose logits are not divided as those of the language model in them: what generate() draws
# from them is sharper than the model, by that factor in the temperature
_UNDIVIDED = {"granite_speech": "logits_scaling", "granite_speech_plus": "logits_scaling"}


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
    ctc = _GRANITE_CTC if kind == "granite_speech" else None
    return Family(kind, media, placeholders=marks, undivided=_UNDIVIDED.get(kind), ctc=ctc)


def reader(model: Any, families: Mapping[str, Family]) -> Reader:
    """What reads a model: a `Backbone`, or what has its calls.

    Raises ValueError for what cannot work, before any forward.
    """
    check_unwrapped(model)
    described, encodes = family(model, families), getattr(model.config, "is_encoder_decoder", False)
    if not encodes and _hf.forward_names(model).isdisjoint(_READ):
        raise ValueError(
            f"{type(model).__name__} reads no tokens, so nothing can be generated with it; if it "
            "is a head, name its target here and give it as drafter="
        )
    if not model.can_generate() and model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} has no output head, so it says no tokens; load it as the "
            "class that does, such as AutoModelForCausalLM or AutoModelForImageTextToText"
        )
    made: Reader = (EncoderDecoder if encodes else Backbone)(model, described)
    made.reader_maker = partial(reader, families=families)
    return made
