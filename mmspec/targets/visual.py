"""The picture side of a model that is read: placeholders, and features for a draft model.

What is particular to a family is data (`mmspec.targets.family`); nothing here names one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

from torch import Tensor

from mmspec import _hf
from mmspec.targets.family import Family


@dataclass(frozen=True)
class FeatureLayout:
    """How the outputs of a model's picture encoders lie over its prompt."""

    placeholders: Mapping[str, int]  # "image" and "video" to the id that stands for its features
    grid: Callable[[Mapping[str, Any], int, int], tuple[int, int] | None]
    # (inputs, picture, features) -> rows, columns; None = unknown
    parts: Callable[[Any], Sequence[Tensor]]  # an encoder's output as (n, H) features per picture


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


def check_embeddable(model: Any, family: Family) -> None:
    """Refuse a draft model that features cannot be given to as embeddings. Raises ValueError."""
    if family.deepstack and model.config.vision_config.deepstack_visual_indexes:
        raise ValueError(
            f"{type(model).__name__} adds picture features inside its decoder (deepstack), "
            "which embeddings cannot carry; give sees='pixels' without a compressor, or views "
            "without 'pooled'"
        )


def _projected(output: Any) -> Sequence[Tensor]:
    return list(output.pooler_output)


def _grid(
    config: Any, family: Family, inputs: Mapping[str, Any], picture: int, count: int
) -> tuple[int, int] | None:
    """Rows and columns of a picture's features laid out line by line; None = unknown."""
    patches = inputs.get("image_grid_thw")
    if patches is not None and inputs.get("pixel_values_videos") is None:
        time, height, width = (int(size) for size in patches[picture])
        merge = config.vision_config.spatial_merge_size
        grid = (time * height // merge, width // merge)
        return grid if time == 1 and grid[0] * grid[1] == count else None
    side = isqrt(count)
    return (side, side) if family.square and side * side == count else None
