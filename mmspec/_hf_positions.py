"""Positions of new tokens that a model of transformers keeps for itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def grid_positions(model: Any, inputs: Mapping[str, Any]) -> Tensor | None:
    """Position ids (3, B, T) of the tokens after `inputs`, a prompt that a GLM-Image has just read.

    The cells of its images, smallest first, have a row and a column; the end of the image follows.
    None for a prompt without `image_grid_thw`.
    """
    if inputs.get("image_grid_thw") is None:  # the model keeps those of the prompt before
        return None
    kept: Tensor | None = model.model._cached_decode_position_ids  # (B, 3, T)
    return None if kept is None else kept.transpose(0, 1)
