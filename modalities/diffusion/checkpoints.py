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
    if entry.target is not None:
        return pretrained(PixArtTransformer2DModel, folder, dtype)
    kind: Any = PixArtAlphaPipeline
    return kind.from_pretrained(folder, dtype=dtype or torch.float32, local_files_only=True)


def processor(entry: Entry, folder: Path) -> Any:
    """Raises ValueError: a pipeline reads its prompts itself."""
    raise ValueError(
        f"{entry.name} has no processor of its own: a pipeline reads its prompts itself; for its "
        f'words take mmspec.zoo.load("{entry.target or entry.name}").tokenizer'
    )
