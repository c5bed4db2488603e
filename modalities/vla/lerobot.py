"""Observations in LeRobot's format: a dictionary of batched tensors.

observation.images.NAME   (B, C, H, W) float in [0, 1], or uint8; `observation.image` for one
observation.state         (B, n), optional
task                      an instruction, or one per row
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec.errors import format_value
from mmspec.models.prismatic_processor import HALF_LEVEL

IMAGE, IMAGES, STATE, TASK = "observation.image", "observation.images.", "observation.state", "task"


@dataclass(frozen=True)
class Observation:
    """An observation of `select_action` as arguments of `predict_action`."""

    image: list[list[Image.Image]]  # per row, per camera
    instruction: list[str]
    state: Any | None  # (B, n)


def parse_observation(observation: Any) -> Observation:
    """Parse an observation. Raises ValueError for other formats."""
    if not isinstance(observation, Mapping):
        raise ValueError(
            f"observation={format_value(observation)} is not a dictionary; give {IMAGE} or "
            f"{IMAGES}NAME, {TASK}, and {STATE} if available"
        )
    images = {n: v for n, v in observation.items() if n == IMAGE or str(n).startswith(IMAGES)}
    if not images or TASK not in observation:
        raise ValueError(
            f"the observation has {', '.join(map(str, observation)) or 'nothing'}; it needs a "
            f"camera image ({IMAGE} or {IMAGES}NAME) and an instruction ({TASK})"
        )
    cameras = [_to_images(name, value) for name, value in images.items()]
    counts = sorted({len(camera) for camera in cameras})
    if len(counts) > 1:
        raise ValueError(f"cameras have {counts} rows; give the same number of each")
    task = observation[TASK]
    if not isinstance(task, str | list | tuple):
        raise ValueError(f"{TASK}={format_value(task)} is not a text; give one, or one per row")
    tasks = [task] * counts[0] if isinstance(task, str) else list(task)
    if len(tasks) != counts[0]:
        raise ValueError(f"{len(tasks)} entries of {TASK} for {counts[0]} rows; give one per row")
    rows = [list(row) for row in zip(*cameras, strict=True)]
    return Observation(rows, tasks, observation.get(STATE))


def _to_images(name: str, value: Any) -> list[Image.Image]:
    """Images of one camera, from channels first."""
    tensor = value if isinstance(value, Tensor) else None
    if tensor is None or tensor.dim() != 4 or tensor.shape[1] != 3 or not tensor.numel():
        raise ValueError(
            f"{name}={format_value(value)} is not a batch of images; give (B, 3, H, W)"
        )
    if tensor.is_floating_point():
        low, high = tensor.aminmax()
        if not (low >= -HALF_LEVEL and high <= 1 + HALF_LEVEL):
            raise ValueError(
                f"{name} holds {float(low):g} to {float(high):g}; give floats in [0, 1], or uint8"
            )
        tensor = (tensor.clamp(0, 1) * 255).round().to(torch.uint8)
    elif tensor.dtype != torch.uint8:
        raise ValueError(f"{name} is {tensor.dtype}; give floats in [0, 1], or uint8")
    return [Image.fromarray(one) for one in tensor.permute(0, 2, 3, 1).numpy(force=True)]
