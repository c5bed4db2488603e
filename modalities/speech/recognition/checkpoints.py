"""Load the bundled recognisers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from mmspec.modality import Entry
from mmspec.zoo.catalogue import load_pretrained


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A model of the class named in the configuration of its folder."""
    [name] = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).architectures
    return load_pretrained(getattr(transformers, name), folder, dtype)


def processor(entry: Entry, folder: Path) -> Any:
    """Feature extractor and tokenizer; the folder of a draft model holds those of its target."""
    return transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
