"""Distances between the images of two pipelines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange

from mmspec.modalities.diffusion.forecast_runner import call_seeded

INK = 0.1  # of the range: the least difference from the background


@dataclass(frozen=True)
class ImageDistance:
    """Distance of images from reference images."""

    relative: float  # |a - b| / |b - mean of b|
    psnr: float | None  # decibel, peak 1; None for equal images
    psnr_on_ink: float | None  # the same where one of the two has ink; None without any
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
    scale, paper = float(np.var(expected)), paper_of(expected)
    ink = has_ink(expected, paper) | has_ink(found, paper)
    return ImageDistance(
        math.sqrt(error / scale) if scale else math.sqrt(error),
        _decibel((found - expected) ** 2),
        _decibel((found - expected)[ink] ** 2),
        _similarity(expected, found),
    )


def _decibel(errors: np.ndarray) -> float | None:
    """PSNR of squared errors; None where they are zero."""
    error = float(np.mean(errors)) if errors.size else 0.0
    return -10 * math.log10(error) if error else None


def paper_of(images: np.ndarray) -> np.ndarray:  # (B, ..., H, W, C) -> (B, 1, ..., 1, C)
    """The background of each image: its median colour."""
    found: np.ndarray = np.median(images, axis=tuple(range(1, images.ndim - 1)), keepdims=True)
    return found


def has_ink(images: np.ndarray, paper: np.ndarray) -> np.ndarray:  # -> (B, ..., H, W) bool
    """Pixels that differ from the background by a tenth of the range or more.

    Blank paper is easy to predict, so a distance over all pixels tells little about a sparse image.
    """
    found: np.ndarray = np.abs(images - paper).max(-1) >= INK
    return found


def _similarity(*pair: np.ndarray) -> float | None:  # (B, ..., H, W, C) each
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure as similarity
    except ImportError:  # `pip install mmspec[quality]`
        return None
    expected, found = (rearrange(torch.from_numpy(a), "... h w c -> (...) c h w") for a in pair)
    score: Any = similarity(found, expected, data_range=1.0)
    return float(score)
