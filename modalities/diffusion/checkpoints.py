"""Load the bundled pipeline, and denoisers that are used with its other parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import PixArtAlphaPipeline, PixArtTransformer2DModel

from mmspec.modality import Entry
from mmspec.zoo.catalogue import load_pretrained


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A pipeline for a target, a denoiser for a draft model."""
    if entry.target is not None:
        return load_pretrained(PixArtTransformer2DModel, folder, dtype)
    kind: Any = PixArtAlphaPipeline
    return kind.from_pretrained(folder, dtype=dtype or torch.float32, local_files_only=True)


def processor(entry: Entry, folder: Path) -> Any:
    """Raises ValueError: a pipeline encodes its prompts itself."""
    raise ValueError(
        f"{entry.name} has no processor: a pipeline encodes its prompts itself; for the tokenizer "
        f'use mmspec.zoo.load("{entry.target or entry.name}").tokenizer'
    )
