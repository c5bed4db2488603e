"""The picture side of a model that is read: placeholders, and features for a draft model.

What is particular to a family is data (`mmspec.targets.readers.family`); nothing here names one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.targets.memory import Memory
from mmspec.targets.readers.family import Family


@dataclass(frozen=True)
class FeatureLayout:
    """How the outputs of a model's picture encoders lie over its prompt."""

    placeholders: Mapping[str, int]  # "image" and "video" to the id that stands for its features
    grid: Callable[[Mapping[str, Any], str, int, int], tuple[int, ...] | None]
    # (inputs, "image" or "video", its number, features) -> rows, columns, behind frames where
    # there are some; None = unknown
    # (fewer than the features where separators stand behind a clip)
    parts: Callable[[Any], Sequence[Tensor]]  # an encoder's output as (n, H) features per picture

    def laid(self, inputs: Mapping[str, Any], modality: str, output: Any) -> Sequence[Tensor]:
        """The features (n, H) of every picture or clip, also where an encoder gives frames."""
        parts, clips = self.parts(output), inputs.get(FRAMES)
        if modality != "video" or clips is None or clips.dim() != 5:
            return parts
        if len(parts) != len(clips) * clips.shape[1]:
            return parts
        return [own.flatten(0, -2) for own in torch.stack(list(parts)).split(clips.shape[1])]


def placeholder_ids(model: Any, family: Family) -> tuple[int, ...]:
    """Ids that stand for visual features in a prompt."""
    found = (getattr(model.config, name, None) for name in family.placeholders)
    return tuple(identity for identity in found if identity is not None)


def visual_ids(model: Any, family: Family) -> tuple[int, ...]:
    """All ids that only make sense beside a picture: placeholders and their frame."""
    found = (getattr(model.config, name, None) for name in family.visual_ids)
    return placeholder_ids(model, family) + tuple(i for i in found if i is not None)


def feature_layout(model: Any, family: Family, tower: bool = False) -> FeatureLayout:
    """How the encoder outputs of a model lie over its prompt.

    With `tower` the features are those before the model's own projector, where there is one per
    placeholder (`Family.tower`), else the projected ones as well.
    """
    named = dict(zip(("image", "video"), placeholder_ids(model, family), strict=False))
    raw = family.tower if tower else None
    parts = _projected if raw is None else partial(raw.parts, model.config)
    return FeatureLayout(named, partial(_grid, model.config, family), parts)


def check_features(model: Any, family: Family) -> None:
    """Refuse a target that cannot hand out its vision features. Raises ValueError."""
    name = type(model).__name__
    if not family.media:
        raise ValueError(
            f"sees='target-features' needs a target with a vision encoder, but {name} reads text "
            "only; give sees='nothing'"
        )
    if "mm_encoder_outputs" not in _hf.forward_names(model):
        raise ValueError(
            f"{name} does not take encoded pictures (mm_encoder_outputs), so its features cannot "
            "be shared; give sees='pixels' or 'nothing'"
        )


def check_embeddable(model: Any) -> None:
    """Refuse a draft model that features cannot be given to as embeddings. Raises ValueError."""
    vision = getattr(model.config, "vision_config", None)
    if getattr(vision, "deepstack_visual_indexes", None):
        raise ValueError(
            f"{type(model).__name__} adds picture features inside its decoder (deepstack), "
            "which embeddings cannot carry; give sees='pixels' without a compressor, or views "
            "without 'pooled'"
        )


def _projected(output: Any) -> Sequence[Tensor]:
    if output.pooler_output is None:
        raise ValueError(
            "the picture encoder gives features from before the model's projector, which cannot be "
            "put between words; give sees='pixels' without a compressor"
        )
    return list(output.pooler_output)


def _grid(
    config: Any, family: Family, inputs: Mapping[str, Any], modality: str, index: int, count: int
) -> tuple[int, ...] | None:
    """The grid of a picture's or a video's features laid out line by line; None = unknown."""
    patches = inputs.get(f"{modality}_grid_thw")
    if patches is not None:
        time, height, width = (int(size) for size in patches[index])
        merge = getattr(config.vision_config, "spatial_merge_size", None)
        if merge is None:  # said by the picture, or by several names: what a picture comes to tells
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
    return (side, side) if family.square and side * side == count else None


FRAMES = "pixel_values_videos"
PIXELS = ("pixel_values", FRAMES)


def check_carrier(inputs: Mapping[str, Any]) -> None:
    """Refuse a request without a prompt, or with one of no tokens. Raises ValueError."""
    ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
    if ids is None and embeds is None:
        raise ValueError(
            "the request has no input_ids; pass the processor's output: generate(**inputs)"
        )
    if ids is not None and embeds is not None and ids.shape != embeds.shape[:2]:
        raise ValueError(
            f"input_ids are {tuple(ids.shape)} and inputs_embeds {tuple(embeds.shape)}: they must "
            "tell of the same tokens; give one of them"
        )
    if (ids if embeds is None else embeds).shape[1] == 0:  # type: ignore[union-attr]
        raise ValueError("the prompt is empty (input_ids has no tokens); give at least one token")


def check_request(model: Any, family: Family, inputs: Mapping[str, Any]) -> None:
    """Refuse a request whose pictures and prompt do not fit, before any forward.

    Raises ValueError: picture for a text model, picture without placeholder, placeholder without
    picture. How many pictures a row has is its own affair: the model counts them.
    """
    if not family.writes:
        raise ValueError(
            f"{type(model).__name__} draws pictures here and writes no text; call generate_images()"
        )
    ids: Tensor | None = inputs.get("source_ids", inputs.get("input_ids"))
    embeds = inputs.get("inputs_embeds")
    names = dict.fromkeys((*PIXELS, *family.media))
    pictures = [name for name in names if inputs.get(name) is not None]
    if not family.media:
        if pictures:
            raise ValueError(
                f"{', '.join(pictures)} was given, but {type(model).__name__} is a text model; "
                "drop it or load a vision-language model"
            )
        return
    foreign = [name for name in pictures if name not in _hf.forward_names(model)]
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)} was given, but {type(model).__name__} reads none; drop it, or "
            f"give {' or '.join(one for one in family.media if one not in foreign)}"
        )
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


SIZES = "sizes"


def counted(reader: Any, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensor | None]:
    """A request without its sizes (B, L), and these where a mask of ours can tell of them.

    That is where every layer is causal and attends to everything, and any slot counts twice. The
    score of a slot that n equal ones are merged in grows by log n, for every layer and query
    (proportional attention of ToMe, Bolya et al. 2023).
    """
    rest = {name: value for name, value in inputs.items() if name != SIZES}
    sizes = inputs.get(SIZES)
    is_plain = reader.layer_kinds == ("full_attention",) and inputs.get("token_type_ids") is None
    if sizes is None or not is_plain or reader.stepwise or int(sizes.max()) == 1:
        return rest, None
    return rest, sizes


def causal(sizes: Tensor, seen: Tensor | None, dtype: torch.dtype) -> Tensor:  # (B, 1, L, L)
    """The additive mask of a prompt whose slots count `sizes` (B, L) times.

    `seen` (B, L) hides padding; a padded slot sees itself, so that its softmax is over something.
    """
    length = sizes.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool, device=sizes.device).tril()[None, None]
    if seen is not None:
        own = torch.eye(length, dtype=torch.bool, device=sizes.device)
        visible = visible & (seen[:, None, None].bool() | own)
    bias = sizes.log().to(dtype)[:, None, None]
    return torch.where(visible, bias, torch.finfo(dtype).min)


def weigh(memory: Memory, sizes: Tensor) -> None:  # (B, L)
    """Have slots of a prompt count as often in blocks behind it."""
    memory.bare = False
    memory.mask.add(sizes.log())


def hide(memory: Memory, seen: Tensor) -> None:  # (B, L) 0 = hidden
    """Leave out slots of a prompt that nobody sees, also between others."""
    memory.bare = False
    memory.padding = tuple((seen == 0).sum(-1).tolist())
    memory.mask.add(torch.where(seen == 0, memory.mask.hide, 0.0))
