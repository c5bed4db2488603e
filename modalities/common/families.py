"""Models that read pictures: the differences between their families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.modalities.common import readers
from mmspec.targets.readers.family import Family, TowerFeatures
from mmspec.targets.readers.reader import Reader

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
    """A request with the ids of a picture, which public processors leave to the model."""
    return dict(model.completed(inputs))


def _plain(name: str, *visual_ids: str, **facts: Any) -> Family:
    return Family(name, _PIXELS, direct=True, placeholders=_IMAGE, visual_ids=visual_ids, **facts)


def _filmed(name: str, *others: str) -> Family:
    return Family(name, (*_PIXELS, *others), direct=True, placeholders=_IMAGE_VIDEO)


def _mrope(name: str, **facts: Any) -> Family:
    facts |= {"placeholders": _IMAGE_VIDEO, "visual_ids": _QWEN_FRAME}
    return Family(name, _PIXELS, 3, direct=True, **facts)


FAMILIES: Mapping[str, Family] = {
    "llava": _plain("LLaVA", square=True, tower=_LLAVA_TOWER),
    "llava_next": _plain("LLaVA-NeXT"),
    "llava_onevision": _filmed("LLaVA-OneVision"),
    "llava_next_video": _filmed("LLaVA-NeXT-Video"),
    "video_llava": _filmed("Video-LLaVA", "pixel_values_images"),
    "qwen2_vl": _mrope("Qwen2-VL"),
    "qwen2_5_vl": _mrope("Qwen2.5-VL"),
    "qwen3_vl": _mrope("Qwen3-VL"),
    "qwen3_5": _mrope("Qwen3.5-VL"),
    "gemma3": _plain("Gemma 3", "boi_token_id", "eoi_token_id", square=True),
    "idefics3": _plain("Idefics3"),
    "smolvlm": _plain("SmolVLM"),
    "internvl": _plain("InternVL", square=True),
    "paligemma": _plain("PaliGemma", square=True, tower=_PALIGEMMA_TOWER),
    "mistral3": _plain("Mistral3 / Pixtral"),
    "lfm2_vl": _plain("LFM2-VL"),
    "prismatic": _plain("Prismatic", square=True, completed=_with_image_ids),
    "openvla": _plain("OpenVLA", square=True, completed=_with_image_ids),
}


def reader(model: Any) -> Reader:
    """What reads a model: `Backbone`, or `EncoderDecoder`.

    Raises ValueError for one that says no tokens.
    """
    if model.config.model_type == "pi0":
        raise ValueError(
            f"{type(model).__name__} says no tokens but moves noise to actions in Euler steps; "
            "call mmspec.modalities.vla.flow.sample_actions(model, **inputs)"
        )
    return readers.reader(model, FAMILIES)


def family(model: Any) -> Family:
    """The family of a model; plain text for language models that are not listed."""
    return readers.family(model, FAMILIES)
