"""Distances between the images of two pipelines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange

from mmspec.modalities.diffusion.runners import call_seeded


@dataclass(frozen=True)
class ImageDistance:
    """Distance of images from reference images."""

    relative: float  # |a - b| / |b - mean of b|
    psnr: float | None  # decibel, peak 1; None for equal images
    ssim: float | None  # structural similarity (Wang et al. 2004); None without torchmetrics


def output_images(output: Any) -> np.ndarray:  # (B, ..., H, W, 3) floats in [0, 1]
    """The images in a pipeline's output for output_type="np"."""
    images: np.ndarray = np.asarray(output[0])
    return images


def generate_reference(pipe: Any, request: Mapping[str, Any], seed: int) -> np.ndarray:
    """Images of the pipeline's own call, with all noise drawn from `seed`."""
    return output_images(call_seeded(pipe, {**request, "output_type": "np"}, seed))


def compare_images(expected: np.ndarray, found: np.ndarray) -> ImageDistance:
    """Distance over all images together."""
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    error = float(np.mean((found - expected) ** 2))
    scale = float(np.var(expected))
    return ImageDistance(
        math.sqrt(error / scale) if scale else math.sqrt(error),
        -10 * math.log10(error) if error else None,
        _similarity(expected, found),
    )


def _similarity(*pair: np.ndarray) -> float | None:  # (B, ..., H, W, C) each
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure as similarity
    except ImportError:  # `pip install mmspec[quality]`
        return None
    expected, found = (rearrange(torch.from_numpy(a), "... h w c -> (...) c h w") for a in pair)
    score: Any = similarity(found, expected, data_range=1.0)
    return float(score)
