"""Families of token models: which one a model belongs to, and the reader of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from mmspec import _hf, _hf_positions
from mmspec.registry import check_unwrapped
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import CtcHead, Family, Reader, TowerFeatures

# language models whose logits are head(decoder(...)) without a further step
_PLAIN_HEADS = frozenset(("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "smollm3"))
# prefixes of media arguments, and config fields of placeholder ids
_MEDIA = ("pixel_values", "image_patches", "input_features", "input_values", "audio_values")
_MARKS = (
    *("image_token_id", "image_token_index", "video_token_id", "video_token_index"),
    *("audio_token_id", "audio_token_index"),
)


def _granite_frames(model: Any, inputs: Mapping[str, Any], frames: int) -> Tensor | None:
    """Valid frames (B, T) in whole windows: `input_features_mask` counts embeddings, not frames."""
    mask = inputs.get("input_features_mask")
    if mask is None:
        return None
    window = model.config.window_size
    embeddings = window // model.config.downsample_rate  # of one window
    count = mask.sum(-1, keepdim=True) // embeddings * window
    is_valid: Tensor = torch.arange(frames, device=mask.device) < count
    return is_valid


_GRANITE_CTC = CtcHead(
    "input_features",
    lambda model: model.model.encoder,
    lambda model: model.model.encoder.out,
    _granite_frames,
)
_TOKEN_ARGUMENTS = ("input_ids", "args", "kwargs")  # a forward that takes tokens has one of them
# classes that omit the logits scaling of their language model: sampling from them is sharper, by
# that factor in the temperature
_UNDIVIDED = {"granite_speech": "logits_scaling", "granite_speech_plus": "logits_scaling"}


_PIXELS = ("pixel_values", "pixel_values_videos")
_IMAGE = ("image_token_id",)
_IMAGE_VIDEO = ("image_token_id", "video_token_id")
_QWEN_FRAME = ("vision_start_token_id", "vision_end_token_id")


def _llava_width(config: Any) -> int:
    layers = config.vision_feature_layer
    count = 1 if isinstance(layers, int) else len(layers)
    return int(config.vision_config.hidden_size) * count


def _llava_parts(config: Any, output: Any) -> Sequence[Tensor]:
    layers = config.vision_feature_layer
    layers = [layers] if isinstance(layers, int) else layers
    first = 1 if config.vision_feature_select_strategy == "default" else 0  # the class token
    return list(torch.cat([output.hidden_states[layer][:, first:] for layer in layers], -1))


def _llava_class_layer(config: Any) -> int | None:
    """The layer of CLIP that the features come from, the last of several."""
    layers, vision = config.vision_feature_layer, config.vision_config
    if vision.model_type != "clip_vision_model":
        return None
    layer = layers if isinstance(layers, int) else layers[-1]
    return int(layer % (vision.num_hidden_layers + 1)) - 1  # state 0 is the embedding


_LLAVA_TOWER = TowerFeatures(_llava_width, _llava_parts, _llava_class_layer)
_PALIGEMMA_TOWER = TowerFeatures(
    lambda config: int(config.vision_config.hidden_size),
    lambda config, output: list(output.last_hidden_state),
    lambda config: None,
)


def _with_image_ids(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Add the image token ids, which public processors leave to the model."""
    return dict(model.add_image_ids(inputs))


def _image_family(name: str, *visual_ids: str, **facts: Any) -> Family:
    return Family(
        name, _PIXELS, is_direct=True, placeholders=_IMAGE, visual_ids=visual_ids, **facts
    )


def _video_family(name: str, *others: str) -> Family:
    return Family(name, (*_PIXELS, *others), is_direct=True, placeholders=_IMAGE_VIDEO)


def _mrope_family(name: str, **facts: Any) -> Family:
    facts |= {"placeholders": _IMAGE_VIDEO, "visual_ids": _QWEN_FRAME}
    return Family(name, _PIXELS, 3, is_direct=True, **facts)


FAMILIES: Mapping[str, Family] = {
    "llava": _image_family("LLaVA", is_square=True, tower=_LLAVA_TOWER),
    "llava_next": _image_family("LLaVA-NeXT"),
    "llava_onevision": _video_family("LLaVA-OneVision"),
    "llava_next_video": _video_family("LLaVA-NeXT-Video"),
    "video_llava": _video_family("Video-LLaVA", "pixel_values_images"),
    "qwen2_vl": _mrope_family("Qwen2-VL"),
    "qwen2_5_vl": _mrope_family("Qwen2.5-VL"),
    "qwen3_vl": _mrope_family("Qwen3-VL"),
    "qwen3_5": _mrope_family("Qwen3.5-VL"),
    "gemma3": _image_family("Gemma 3", "boi_token_id", "eoi_token_id", is_square=True),
    "idefics3": _image_family("Idefics3"),
    "smolvlm": _image_family("SmolVLM"),
    "internvl": _image_family("InternVL", is_square=True),
    "paligemma": _image_family("PaliGemma", is_square=True, tower=_PALIGEMMA_TOWER),
    "mistral3": _image_family("Mistral3 / Pixtral"),
    "lfm2_vl": _image_family("LFM2-VL"),
    "prismatic": _image_family("Prismatic", is_square=True, add_placeholders=_with_image_ids),
    # no `is_direct`: the positions of a prompt are made by the whole model
    "glm_image": Family(
        "GLM-Image",
        ("pixel_values",),
        placeholders=_IMAGE,
        next_positions=_hf_positions.grid_positions,
    ),
    "openvla": _image_family("OpenVLA", is_square=True, add_placeholders=_with_image_ids),
}


def find_family(model: Any, families: Mapping[str, Family] | None = None) -> Family:
    """Return the family of a model by `config.model_type`; default: the vision-language families.

    A model type that is not listed gets a family made from its config and forward signature. Such
    a model is read by its whole forward, and checked on its first request.
    """
    families = FAMILIES if families is None else families
    kind = model.config.model_type
    if kind in families:
        return families[kind]
    composite = model.config.get_text_config(decoder=True) is not model.config
    media = tuple(sorted(name for name in _hf.forward_names(model) if name.startswith(_MEDIA)))
    if not media and not composite:
        return Family(is_direct=kind in _PLAIN_HEADS)
    marks = tuple(name for name in _MARKS if getattr(model.config, name, None) is not None)
    ctc = _GRANITE_CTC if kind == "granite_speech" else None
    return Family(kind, media, placeholders=marks, logit_divisor=_UNDIVIDED.get(kind), ctc=ctc)


def make_reader(model: Any, families: Mapping[str, Family] | None = None) -> Reader:
    """Return the reader of a model: a `Backbone`, or an `EncoderDecoder`.

    Raises ValueError before any forward for a model that generates no tokens.
    """
    check_unwrapped(model)
    if model.config.model_type == "pi0":
        raise ValueError(
            f"{type(model).__name__} generates no tokens: it denoises actions in Euler steps; "
            "call mmspec.modalities.vla.flow.sample_actions(model, **inputs)"
        )
    family = find_family(model, families)
    encodes = getattr(model.config, "is_encoder_decoder", False)
    if not encodes and _hf.forward_names(model).isdisjoint(_TOKEN_ARGUMENTS):
        raise ValueError(
            f"{type(model).__name__} reads no tokens, so nothing can be generated with it; if it "
            "is a head, name its target here and give it as drafter="
        )
    if model.can_generate() and not isinstance(_hf.unwrap_compiled(model), GenerationMixin):
        raise ValueError(
            f"{type(model).__name__}.generate() is its own and generates no tokens step by step; "
            "call it without mmspec"
        )
    if not model.can_generate() and model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} has no output head, so it predicts no tokens; load it as a "
            "class that has one, such as AutoModelForCausalLM or AutoModelForImageTextToText"
        )
    reader: Reader = (EncoderDecoder if encodes else Backbone)(model, family)
    reader.reader_maker = partial(make_reader, families=families)
    return reader
