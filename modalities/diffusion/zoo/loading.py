"""Load the pipeline of the zoo, and denoisers that work between its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import PixArtAlphaPipeline, PixArtTransformer2DModel

from mmspec.modality import Entry
from mmspec.zoo.loading import pretrained


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A pipeline for a target, its denoiser alone for a drafter."""
    return load_pipeline(folder, dtype) if entry.target is None else load_denoiser(folder, dtype)


def load_pipeline(folder: Path, dtype: torch.dtype | None = None) -> PixArtAlphaPipeline:
    """A text-to-image pipeline from any folder of the same form."""
    kind: Any = PixArtAlphaPipeline
    pipeline: PixArtAlphaPipeline = kind.from_pretrained(
        folder, dtype=dtype or torch.float32, local_files_only=True
    )
    return pipeline


def load_denoiser(folder: Path, dtype: torch.dtype | None = None) -> PixArtTransformer2DModel:
    """A diffusion transformer from any folder of the same form."""
    denoiser: PixArtTransformer2DModel = pretrained(PixArtTransformer2DModel, folder, dtype)
    return denoiser


def processor(entry: Entry, folder: Path) -> Any:
    """Raises ValueError: a pipeline reads its prompts itself."""
    raise ValueError(
        f"{entry.name} has no processor of its own: a pipeline reads its prompts itself; for its "
        f'words take mmspec.zoo.load("{entry.target or entry.name}").tokenizer'
    )
