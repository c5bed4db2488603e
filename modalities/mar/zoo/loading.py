"""Load the checkpoints of continuous tokens of the zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.modality import Entry
from mmspec.models.mar import MarForImageGeneration
from mmspec.zoo.loading import pretrained


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A MAR as the package has it."""
    return load_mar(folder, dtype)


def load_mar(folder: Path, dtype: torch.dtype | None = None) -> MarForImageGeneration:
    """A model of continuous tokens from any folder of the same form."""
    model: MarForImageGeneration = pretrained(MarForImageGeneration, folder, dtype)
    return model


def processor(entry: Entry, folder: Path) -> Any:
    """Raises ValueError: there is none."""
    raise ValueError(
        f"{entry.name} draws classes and reads no words, so it has no processor; give classes to "
        f'generate_images(), and vae=mmspec.zoo.vae("{entry.target or entry.name}") for pixels'
    )
