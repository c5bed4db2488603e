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
    return pretrained(MarForImageGeneration, folder, dtype)


def processor(entry: Entry, folder: Path) -> Any:
    """Raises ValueError: there is none."""
    raise ValueError(
        f"{entry.name} draws classes and reads no words, so it has no processor; give classes to "
        f'generate_images(), and vae=mmspec.zoo.vae("{entry.target or entry.name}") for pixels'
    )
