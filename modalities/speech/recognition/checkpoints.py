"""Load the recognisers of the zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from mmspec.modality import Entry
from mmspec.zoo.loading import pretrained


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A model of the class that its folder names."""
    [name] = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).architectures
    return pretrained(getattr(transformers, name), folder, dtype)


def processor(entry: Entry, folder: Path) -> Any:
    """Feature extractor and tokenizer; a drafter's folder has its target's."""
    return transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
