"""The model families of the zoo, as the trainer sees them: how to build and how to feed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import einops
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from mmspec.zoo.boards import PIXELS, as_pictures
from tools.zoo.vlm.architecture import LanguageShape, llava, qwen
from tools.zoo.vlm.processors import (
    QWEN_MERGE,
    QWEN_PATCH,
    llava_processor,
    qwen_processor,
)

IMAGE_TOKENS = 36


@dataclass(frozen=True)
class ZooFamily:
    """A model family. `image_inputs` turns raw pixels into what its vision tower reads."""

    name: str
    build: Callable[[LanguageShape, PreTrainedTokenizerFast], PreTrainedModel]
    build_processor: Callable[[], ProcessorMixin]
    image_token: str
    image_inputs: Callable[[np.ndarray], dict[str, Tensor]]
    positions: Callable[[PreTrainedModel, Tensor], dict[str, Tensor]]
    positions_from_types: bool  # generate() must be told which ids are images


def image_features(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:  # -> (B, 36, D)
    """What the text model is shown of each picture, in reading order."""
    see: Any = model.get_image_features
    features = see(**inputs, return_dict=True).pooler_output
    return features if isinstance(features, Tensor) else torch.stack(tuple(features))


def _llava_inputs(images: np.ndarray) -> dict[str, Tensor]:
    return {"pixel_values": as_pictures(images)}


def _qwen_inputs(images: np.ndarray) -> dict[str, Tensor]:
    """Patches in the order of Qwen2-VL: merged blocks in reading order, patches inside a block."""
    patches = einops.repeat(
        as_pictures(images),
        "b c (h m p) (w n q) -> (b h w m n) (c t p q)",
        m=QWEN_MERGE,
        n=QWEN_MERGE,
        p=QWEN_PATCH,
        q=QWEN_PATCH,
        t=2,
    )
    side = PIXELS // QWEN_PATCH
    return {
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, side, side]] * len(images)),
    }


def _no_positions(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    return {}


def _qwen_positions(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Rotary positions of one row serve all: the picture comes first and padding last."""
    row = ids[:1]
    is_image = (row == model.config.image_token_id).int()
    side = PIXELS // QWEN_PATCH
    grid = torch.tensor([[1, side, side]])
    positions, _ = model.model.get_rope_index(row, is_image, image_grid_thw=grid)
    return {"position_ids": positions.expand(-1, len(ids), -1)}


FAMILIES = {
    "llava": ZooFamily(
        "llava", llava, llava_processor, "<image>", _llava_inputs, _no_positions, False
    ),
    "qwen2.5-vl": ZooFamily(
        "qwen2.5-vl", qwen, qwen_processor, "<|image_pad|>", _qwen_inputs, _qwen_positions, True
    ),
}
