"""Pictures of pipelines as numbers, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange

from mmspec.modalities.diffusion.forecasts import seeded


@dataclass(frozen=True)
class Apart:
    """How far pictures are from those they should be."""

    relative: float  # |a - b| / |b - mean of b|
    psnr: float | None  # decibel, peak 1; None where they are equal
    ssim: float | None  # structural similarity (Wang et al. 2004); None without torchmetrics


def pictures(output: Any) -> np.ndarray:  # (B, ..., H, W, 3) floats in [0, 1]
    """What a pipeline returned for output_type="np"."""
    made: np.ndarray = np.asarray(output[0])
    return made


def own_pictures(pipe: Any, asked: Mapping[str, Any], seed: int) -> np.ndarray:
    """The pipeline's own call, all of its noise coming from `seed`."""
    return pictures(seeded(pipe, {**asked, "output_type": "np"}, seed))


def apart(wanted: np.ndarray, found: np.ndarray) -> Apart:
    """Over all pictures together."""
    wanted, found = wanted.astype(np.float64), found.astype(np.float64)
    error = float(np.mean((found - wanted) ** 2))
    scale = float(np.var(wanted))
    return Apart(
        math.sqrt(error / scale) if scale else math.sqrt(error),
        -10 * math.log10(error) if error else None,
        _similarity(wanted, found),
    )


def _similarity(*pair: np.ndarray) -> float | None:  # (B, ..., H, W, C) each
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure as similarity
    except ImportError:  # `pip install mmspec[quality]`
        return None
    wanted, found = (rearrange(torch.from_numpy(a), "... h w c -> (...) c h w") for a in pair)
    score: Any = similarity(found, wanted, data_range=1.0)
    return float(score)
