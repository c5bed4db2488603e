"""Vision-language models: the differences between families, and the checks on their requests."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from mmspec.compressors.contract import Grid
from mmspec.drafters.neural.sight import Optics
from mmspec.targets.backbone import Backbone, Family

VOCABULARY_PADDING = (
    512  # most ids by which padded vocabularies of one tokenizer differ (Qwen: 128)
)

_PIXELS = ("pixel_values", "pixel_values_videos")
_IMAGE = ("image_token_id",)
_IMAGE_VIDEO = ("image_token_id", "video_token_id")
_QWEN_FRAME = ("vision_start_token_id", "vision_end_token_id")


def _plain(name: str, *visual_ids: str, one_run: bool = True) -> Family:
    return Family(
        name, _PIXELS, direct=True, placeholders=_IMAGE, visual_ids=visual_ids, one_run=one_run
    )


def _mrope(name: str) -> Family:
    return Family(name, _PIXELS, 3, direct=True, placeholders=_IMAGE_VIDEO, visual_ids=_QWEN_FRAME)


FAMILIES: Mapping[str, Family] = {
    "llava": _plain("LLaVA"),
    "llava_next": _plain("LLaVA-NeXT"),
    "llava_onevision": Family("LLaVA-OneVision", _PIXELS, direct=True, placeholders=_IMAGE_VIDEO),
    "qwen2_vl": _mrope("Qwen2-VL"),
    "qwen2_5_vl": _mrope("Qwen2.5-VL"),
    "qwen3_vl": _mrope("Qwen3-VL"),
    "qwen3_5": _mrope("Qwen3.5-VL"),
    "gemma3": _plain("Gemma 3", "boi_token_id", "eoi_token_id"),
    "idefics3": _plain("Idefics3", one_run=False),
    "smolvlm": _plain("SmolVLM", one_run=False),
    "internvl": _plain("InternVL"),
    "paligemma": _plain("PaliGemma"),
    "mistral3": _plain("Mistral3 / Pixtral", one_run=False),
    "lfm2_vl": _plain("LFM2-VL"),
}


def placeholder_ids(model: Any, family: Family) -> tuple[int, ...]:
    """Ids that stand for visual features in a prompt."""
    found = (getattr(model.config, name, None) for name in family.placeholders)
    return tuple(identity for identity in found if identity is not None)


def visual_ids(model: Any, family: Family) -> tuple[int, ...]:
    """All ids that only make sense beside a picture: placeholders and their frame."""
    found = (getattr(model.config, name, None) for name in family.visual_ids)
    return placeholder_ids(model, family) + tuple(i for i in found if i is not None)


def check(model: Any, family: Family, inputs: Mapping[str, Any]) -> None:
    """Refuse a request whose pictures and prompt do not fit, before any forward.

    Raises ValueError: picture for a text model, picture without placeholder, placeholder without
    picture, rows with different numbers of pictures, an empty prompt.
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
    runs = (marks[:, :1].long() + (marks[:, 1:] & ~marks[:, :-1]).sum(-1, keepdim=True))[:, 0]
    if family.one_run and len(set(runs.tolist())) > 1:
        raise ValueError(
            f"the rows of this batch have different numbers of pictures ({runs.tolist()}); group "
            "prompts with equally many"
        )


def check_pair(target: Backbone, drafter: Backbone, sees: str) -> None:
    """Refuse a draft model that cannot draft for this target.

    Raises ValueError: vocabularies that differ by more than padding, a picture for a draft model
    without an encoder, another image token.
    """
    ours, theirs = target.vocabulary, drafter.vocabulary
    if abs(ours - theirs) > VOCABULARY_PADDING:
        raise ValueError(
            f"the draft model has a vocabulary of {theirs} tokens, the target one of {ours}: their "
            "token ids do not mean the same; choose a draft model with the target's tokenizer"
        )
    if sees == "pixels" and not drafter.family.media:
        raise ValueError(
            "sees='pixels' needs a draft model with a vision encoder, but "
            f"{type(drafter.model).__name__} reads text only; give sees='nothing' or a "
            "vision-language draft model"
        )
    if sees == "pixels":
        mine = placeholder_ids(target.model, target.family)
        other = placeholder_ids(drafter.model, drafter.family)
        if mine[:1] != other[:1]:
            raise ValueError(
                f"the image token is {mine[:1]} for the target but {other[:1]} for the draft "
                "model; choose a pair that shares its processor"
            )

    if sees == "target-features":
        check_features(target)
        check_woven(drafter)
        frame = max(visual_ids(target.model, target.family), default=0)
        if not drafter.family.media and frame >= theirs:
            raise ValueError(
                f"the prompt frames pictures with token {frame}, but the draft model knows "
                f"{theirs} tokens only; give sees='nothing' or resize its embeddings"
            )


def check_features(target: Backbone) -> None:
    """Refuse a target that cannot hand out its vision features. Raises ValueError."""
    name = type(target.model).__name__
    if not target.family.media:
        raise ValueError(
            f"sees='target-features' needs a target with a vision encoder, but {name} reads text "
            "only; give sees='nothing'"
        )
    if "mm_encoder_outputs" not in inspect.signature(target.model.forward).parameters:
        raise ValueError(
            f"{name} does not take encoded pictures (mm_encoder_outputs), so its features cannot "
            "be shared; give sees='pixels' or 'nothing'"
        )


def check_woven(drafter: Backbone) -> None:
    """Refuse a draft model that features cannot be given to as embeddings. Raises ValueError."""
    vision = getattr(drafter.model.config, "vision_config", None)
    if getattr(vision, "deepstack_visual_indexes", None) and drafter.family.name == "Qwen3-VL":
        raise ValueError(
            f"{type(drafter.model).__name__} adds picture features inside its decoder (deepstack), "
            "which embeddings cannot carry; give sees='pixels' without a compressor, or views "
            "without 'pooled'"
        )


def optics(backbone: Backbone, tower: bool = False) -> Optics:
    """How the encoder outputs of a model map to its prompt.

    With `tower` the features are those before the model's own projector, where there is one per
    placeholder (`tower_width`), else the projected ones as well.
    """
    ids = placeholder_ids(backbone.model, backbone.family)
    named = dict(zip(("image", "video"), ids, strict=False))
    raw = tower and tower_width(backbone.model) is not None
    parts = partial(_tower_parts, backbone.model.config) if raw else _pooled_parts
    return Optics(named, partial(_grid, backbone.model.config, backbone.family), parts)


def tower_width(model: Any) -> int | None:
    """Width of the vision tower's features; None where it has not one per placeholder."""
    config = model.config
    if config.model_type == "paligemma":
        return int(config.vision_config.hidden_size)
    if config.model_type == "llava":
        layers = config.vision_feature_layer
        count = 1 if isinstance(layers, int) else len(layers)
        return int(config.vision_config.hidden_size) * count
    return None


def _pooled_parts(output: Any) -> Sequence[Tensor]:
    return list(output.pooler_output)


def _tower_parts(config: Any, output: Any) -> Sequence[Tensor]:
    if config.model_type == "paligemma":
        return list(output.last_hidden_state)
    layers = config.vision_feature_layer
    layers = [layers] if isinstance(layers, int) else layers
    first = 1 if config.vision_feature_select_strategy == "default" else 0  # the class token
    return list(torch.cat([output.hidden_states[layer][:, first:] for layer in layers], -1))


_SQUARE = ("LLaVA", "Gemma 3", "PaliGemma", "InternVL")


def _grid(
    config: Any, family: Family, inputs: Mapping[str, Any], picture: int, count: int
) -> Grid | None:
    """Rows and columns of a picture's features laid out line by line; None = unknown."""
    patches = inputs.get("image_grid_thw")
    if patches is not None and inputs.get("pixel_values_videos") is None:
        time, height, width = (int(size) for size in patches[picture])
        merge = config.vision_config.spatial_merge_size
        grid = (time * height // merge, width // merge)
        return grid if time == 1 and grid[0] * grid[1] == count else None
    side = isqrt(count)
    return (side, side) if family.name in _SQUARE and side * side == count else None


def _marks(model: Any, family: Family, ids: Tensor) -> Tensor:  # (B, L) bool
    marks = ids < 0
    for identity in placeholder_ids(model, family):
        marks = marks | (ids == identity)
    return marks
