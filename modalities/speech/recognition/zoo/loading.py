"""Load the recognisers of the zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from mmspec.modality import Entry
from mmspec.models.heads.multi_token import load_multi_token_heads
from mmspec.zoo.catalogue import path
from mmspec.zoo.loading import pretrained


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A model of the class that its folder names; heads on the states of one."""
    if entry.sees == "target-states":
        heads: Any = load_multi_token_heads(folder)
        return heads.to(dtype or torch.float32).train(False)
    [name] = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).architectures
    return pretrained(getattr(transformers, name), folder, dtype)


def processor(entry: Entry, folder: Path) -> Any:
    """Feature extractor and tokenizer; for heads, their target's."""
    if entry.sees == "target-states":
        assert entry.target is not None
        folder = path(entry.target)
    return transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
