"""Load the language checkpoints of the zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.modality import Entry
from mmspec.zoo.loading import load_folder, load_processor


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A model of transformers; of a class that takes pictures where it sees them."""
    return load_folder(folder, entry.sees == "pixels", dtype)


def processor(entry: Entry, folder: Path) -> Any:
    """The processor of a model that sees, the tokenizer of one that does not."""
    return load_processor(folder, entry.sees == "pixels")
