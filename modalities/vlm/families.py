"""Vision-language models: the differences between families, and the checks on their requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.targets.family import Family, TowerFeatures
from mmspec.targets.visual import placeholder_ids

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


_LLAVA_TOWER = TowerFeatures(_llava_width, _llava_parts)
_PALIGEMMA_TOWER = TowerFeatures(
    lambda config: int(config.vision_config.hidden_size),
    lambda config, output: list(output.last_hidden_state),
)


def _plain(name: str, *visual_ids: str, **facts: Any) -> Family:
    return Family(name, _PIXELS, direct=True, placeholders=_IMAGE, visual_ids=visual_ids, **facts)


def _mrope(name: str, **facts: Any) -> Family:
    facts |= {"placeholders": _IMAGE_VIDEO, "visual_ids": _QWEN_FRAME}
    return Family(name, _PIXELS, 3, direct=True, **facts)


FAMILIES: Mapping[str, Family] = {
    "llava": _plain("LLaVA", square=True, tower=_LLAVA_TOWER),
    "llava_next": _plain("LLaVA-NeXT"),
    "llava_onevision": Family("LLaVA-OneVision", _PIXELS, direct=True, placeholders=_IMAGE_VIDEO),
    "qwen2_vl": _mrope("Qwen2-VL"),
    "qwen2_5_vl": _mrope("Qwen2.5-VL"),
    "qwen3_vl": _mrope("Qwen3-VL", deepstack=True),
    "qwen3_5": _mrope("Qwen3.5-VL"),
    "gemma3": _plain("Gemma 3", "boi_token_id", "eoi_token_id", square=True),
    "idefics3": _plain("Idefics3"),
    "smolvlm": _plain("SmolVLM"),
    "internvl": _plain("InternVL", square=True),
    "paligemma": _plain("PaliGemma", square=True, tower=_PALIGEMMA_TOWER),
    "mistral3": _plain("Mistral3 / Pixtral"),
    "lfm2_vl": _plain("LFM2-VL"),
}


def check(model: Any, family: Family, inputs: Mapping[str, Any]) -> None:
    """Refuse a request whose pictures and prompt do not fit, before any forward.

    Raises ValueError: picture for a text model, picture without placeholder, placeholder without
    picture, an empty prompt. How many pictures a row has is its own affair: the model counts them.
    """
    if not family.writes:
        raise ValueError(
            f"{type(model).__name__} draws pictures here and writes no text; call generate_images()"
        )
    ids: Tensor | None = inputs.get("input_ids")
    embeds = inputs.get("inputs_embeds")
    if ids is None and embeds is None:
        raise ValueError(
            "the request has no input_ids; pass the processor's output: generate(**inputs)"
        )
    length = ids.shape[-1] if ids is not None else embeds.shape[1]  # type: ignore[union-attr]
    if length == 0:
        raise ValueError("the prompt is empty (input_ids has no tokens); give at least one token")
    pictures = [name for name in _PIXELS if inputs.get(name) is not None]
    if not family.media:
        if pictures:
            raise ValueError(
                f"{', '.join(pictures)} was given, but {type(model).__name__} is a text model; "
                "drop it or load a vision-language model"
            )
        return
    if ids is None or not family.placeholders:
        return
    marks = _marks(model, family, ids)
    pictures += [name for name in ("mm_encoder_outputs",) if inputs.get(name)]
    if pictures and not bool(marks.any()):
        raise ValueError(
            "a picture was given, but the prompt has no image token; build the prompt with the "
            "processor's chat template or put its image token into the text"
        )
    if not pictures and embeds is None and bool(marks.any()):
        raise ValueError(
            "the prompt has image tokens, but no picture was given; pass images= to the processor, "
            "or remove the image token from the text"
        )


def _marks(model: Any, family: Family, ids: Tensor) -> Tensor:  # (B, L) bool
    marks = ids < 0
    for identity in placeholder_ids(model, family):
        marks = marks | (ids == identity)
    return marks
