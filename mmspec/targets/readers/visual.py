"""Image inputs of a model: placeholders, and features for a draft model.

Differences between families are data (`mmspec.targets.readers.reader.Family`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.targets.memory import Memory

if TYPE_CHECKING:
    from mmspec.targets.readers.reader import Family, Reader


@dataclass(frozen=True)
class FeatureLayout:
    """Layout of the outputs of a model's image encoders over its prompt."""

    placeholders: Mapping[str, int]  # "image" and "video" to the placeholder id
    grid: Callable[[Mapping[str, Any], str, int, int], tuple[int, ...] | None]
    # (inputs, "image" or "video", its number, features) -> [frames,] rows, columns; None = unknown
    # (fewer than the features if separators follow a clip)
    parts: Callable[[Any], Sequence[Tensor]]  # an encoder's output -> (n, H) features per image

    def split_features(
        self, inputs: Mapping[str, Any], modality: str, output: Any
    ) -> Sequence[Tensor]:
        """The features (n, H) of every image or clip, also if an encoder returns frames."""
        parts, clips = self.parts(output), inputs.get(FRAMES)
        if modality != "video" or clips is None or clips.dim() != 5:
            return parts
        if len(parts) != len(clips) * clips.shape[1]:
            return parts
        return [own.flatten(0, -2) for own in torch.stack(list(parts)).split(clips.shape[1])]


def placeholder_ids(model: Any, family: Family) -> tuple[int, ...]:
    """Placeholder ids of visual features in a prompt."""
    found = (getattr(model.config, name, None) for name in family.placeholders)
    return tuple(identity for identity in found if identity is not None)


def visual_ids(model: Any, family: Family) -> tuple[int, ...]:
    """All ids of images: placeholders and the ids around them."""
    found = (getattr(model.config, name, None) for name in family.visual_ids)
    return placeholder_ids(model, family) + tuple(i for i in found if i is not None)


def feature_layout(model: Any, family: Family, tower: bool = False) -> FeatureLayout:
    """Layout of the encoder outputs of a model over its prompt.

    With `tower` the features are those before the model's own projector, if there is one per
    placeholder (`Family.tower`), else the projected ones.
    """
    named = dict(zip(("image", "video"), placeholder_ids(model, family), strict=False))
    raw = family.tower if tower else None
    parts = _projected_features if raw is None else partial(raw.parts, model.config)
    return FeatureLayout(named, partial(_grid, model.config, family), parts)


def check_features(model: Any, family: Family) -> None:
    """Check that a target provides its vision features. Raises ValueError."""
    name = type(model).__name__
    if not family.media:
        raise ValueError(
            f"sees='target-features' needs a target with a vision encoder, but {name} reads text "
            "only; give sees='nothing'"
        )
    if "mm_encoder_outputs" not in _hf.forward_names(model):
        raise ValueError(
            f"{name} does not take encoded images (mm_encoder_outputs), so its features cannot "
            "be shared; give sees='pixels' or 'nothing'"
        )


def check_embeddable(model: Any) -> None:
    """Check that a draft model takes features as embeddings. Raises ValueError."""
    vision = getattr(model.config, "vision_config", None)
    if getattr(vision, "deepstack_visual_indexes", None):
        raise ValueError(
            f"{type(model).__name__} adds image features inside its decoder (deepstack), "
            "which embeddings cannot carry; give sees='pixels' without a compressor, or views "
            "without 'pooled'"
        )


def _projected_features(output: Any) -> Sequence[Tensor]:
    if output.pooler_output is None:
        raise ValueError(
            "the image encoder returns features before the model's projector, which cannot be used "
            "as embeddings; give sees='pixels' without a compressor"
        )
    return list(output.pooler_output)


def _grid(
    config: Any, family: Family, inputs: Mapping[str, Any], modality: str, index: int, count: int
) -> tuple[int, ...] | None:
    """The grid of the features of an image or video in raster order; None = unknown."""
    patches = inputs.get(f"{modality}_grid_thw")
    if patches is not None:
        time, height, width = (int(size) for size in patches[index])
        merge = getattr(config.vision_config, "spatial_merge_size", None)
        if merge is None:  # named differently: inferred from the number of features
            merge = max(isqrt(time * height * width // max(count, 1)), 1)
        grid = (time, height // merge, width // merge)
        if prod(grid) != count:
            return None
        return grid if time > 1 else grid[1:]
    clips = inputs.get(FRAMES)
    if modality == "video" and clips is not None and clips.dim() == 5:  # (B, F, C, rows, columns)
        each = count // clips.shape[1]
        side = isqrt(each)
        square = (side, side) if side * side == each else (1, each)
        return (clips.shape[1], *square) if clips.shape[1] > 1 else square
    side = isqrt(count)
    return (side, side) if family.is_square and side * side == count else None


FRAMES = "pixel_values_videos"
PIXELS = ("pixel_values", FRAMES)


def check_carrier(inputs: Mapping[str, Any]) -> None:
    """Check that a request has a prompt with tokens. Raises ValueError."""
    ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
    if ids is None and embeds is None:
        raise ValueError(
            "the request has no input_ids; pass the processor's output: generate(**inputs)"
        )
    if ids is not None and embeds is not None and ids.shape != embeds.shape[:2]:
        raise ValueError(
            f"input_ids are {tuple(ids.shape)} and inputs_embeds {tuple(embeds.shape)}: they must "
            "be of the same tokens; give one of them"
        )
    if (ids if embeds is None else embeds).shape[1] == 0:  # type: ignore[union-attr]
        raise ValueError("the prompt is empty (input_ids has no tokens); give at least one token")


def check_request(model: Any, family: Family, inputs: Mapping[str, Any]) -> None:
    """Check that images and prompt of a request match, before any forward.

    Raises ValueError: image for a text model, image without placeholder, placeholder without
    image. The number of images per row is checked by the model.
    """
    if not family.writes_text:
        raise ValueError(
            f"{type(model).__name__} generates images and no text; call generate_images()"
        )
    ids: Tensor | None = inputs.get("source_ids", inputs.get("input_ids"))
    embeds = inputs.get("inputs_embeds")
    names = dict.fromkeys((*PIXELS, *family.media))
    images = [name for name in names if inputs.get(name) is not None]
    if not family.media:
        if images:
            raise ValueError(
                f"{', '.join(images)} was given, but {type(model).__name__} is a text model; "
                "drop it or load a vision-language model"
            )
        return
    foreign = [name for name in images if name not in _hf.forward_names(model)]
    if foreign:
        others = " or ".join(one for one in family.media if one in _hf.forward_names(model))
        raise ValueError(
            f"{', '.join(foreign)} was given, but forward() of {type(model).__name__} has no "
            f"argument of that name; drop it{f', or give {others}' if others else ''}"
        )
    if ids is None or not family.placeholders:
        return
    marks = _marks(model, family, ids)
    encoded = inputs.get("mm_encoder_outputs")
    images += ["mm_encoder_outputs"] if isinstance(encoded, Mapping) and encoded else []
    if images and not bool(marks.any()):
        raise ValueError(
            "an image was given, but the prompt has no image token; build the prompt with the "
            "processor's chat template or put its image token into the text"
        )
    if not images and embeds is None and bool(marks.any()):
        raise ValueError(
            "the prompt has image tokens, but no image was given; pass images= to the processor, "
            "or remove the image token from the text"
        )


def _marks(model: Any, family: Family, ids: Tensor) -> Tensor:  # (B, L) bool
    marks = ids < 0
    for identity in placeholder_ids(model, family):
        marks = marks | (ids == identity)
    return marks


SIZES = "sizes"


def pop_sizes(reader: Any, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensor | None]:
    """Remove the sizes (B, L) from a request; return them if the mask can represent them.

    That is if every layer has full causal attention, and any size exceeds 1. The score of a slot
    into which n slots are merged grows by log n, for every layer and query (proportional attention
    of ToMe, Bolya et al. 2023).
    """
    rest = {name: value for name, value in inputs.items() if name != SIZES}
    sizes = inputs.get(SIZES)
    is_plain = reader.layer_kinds == ("full_attention",) and inputs.get("token_type_ids") is None
    if sizes is None or not is_plain or reader.stepwise or int(sizes.max()) == 1:
        return rest, None
    return rest, sizes


def make_causal_mask(
    sizes: Tensor, seen: Tensor | None, dtype: torch.dtype
) -> Tensor:  # (B, 1, L, L)
    """The additive causal mask of a prompt whose slots have `sizes` (B, L).

    `seen` (B, L) masks padding; a padded slot attends to itself, so that its softmax is defined.
    """
    length = sizes.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool, device=sizes.device).tril()[None, None]
    if seen is not None:
        own = torch.eye(length, dtype=torch.bool, device=sizes.device)
        visible = visible & (seen[:, None, None].bool() | own)
    bias = sizes.log().to(dtype)[:, None, None]
    return torch.where(visible, bias, torch.finfo(dtype).min)


def add_size_bias(memory: Memory, sizes: Tensor) -> None:  # (B, L)
    """Apply the sizes of prompt slots to blocks after it."""
    memory.is_maskless = False
    memory.mask.add(sizes.log())


def hide_slots(memory: Memory, seen: Tensor) -> None:  # (B, L) 0 = masked
    """Mask slots of a prompt, also between others."""
    memory.is_maskless = False
    memory.padding = tuple((seen == 0).sum(-1).tolist())
    memory.mask.add(torch.where(seen == 0, memory.mask.hide, 0.0))


def encode_media(backbone: Reader, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request with encoded images; sizes and grids stay, as positions depend on them."""
    rest = {name: value for name, value in inputs.items() if name not in backbone.family.media}
    rest.pop("pixel_attention_mask", None)
    compiled, model = vars(backbone).get("compiled"), backbone.model
    if compiled is not None:
        model = compiled.attach_images(backbone, model)
    return {**rest, **_hf.encode_media(model, inputs)}
