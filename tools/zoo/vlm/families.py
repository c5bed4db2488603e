"""Model families of the bundled language models: builders, processors, image inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import einops
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from mmspec.zoo.scene_tensors import PIXELS, images_to_tensor
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
    """A model family. `image_inputs` converts pixels to inputs of its vision tower."""

    name: str
    build: Callable[[LanguageShape, PreTrainedTokenizerFast], PreTrainedModel]
    build_processor: Callable[[], ProcessorMixin]
    image_token: str
    image_inputs: Callable[[np.ndarray], dict[str, Tensor]]
    positions: Callable[[PreTrainedModel, Tensor], dict[str, Tensor]]
    positions_from_types: bool  # whether generate() needs `mm_token_type_ids`


def image_features(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:  # -> (B, 36, D)
    """Return the image features of each image, in reading order."""
    encode: Any = model.get_image_features
    features = encode(**inputs, return_dict=True).pooler_output
    return features if isinstance(features, Tensor) else torch.stack(tuple(features))


def _llava_inputs(images: np.ndarray) -> dict[str, Tensor]:
    return {"pixel_values": images_to_tensor(images)}


def _qwen_inputs(images: np.ndarray) -> dict[str, Tensor]:
    """Patches in the order of Qwen2-VL: merged blocks in reading order, patches inside a block."""
    patches = einops.repeat(
        images_to_tensor(images),
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
    """Return position ids of the first row for all rows: the image comes first, padding last."""
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
