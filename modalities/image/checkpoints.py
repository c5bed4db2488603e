"""Load the bundled image-token checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.modality import Entry
from mmspec.models.heads.feature_head import load_head
from mmspec.zoo.catalogue import load_folder, load_processor, path


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A Janus model, or a `FeatureHead` that drafts from the hidden states of one."""
    if entry.sees != "target-states":
        return load_folder(folder, sees=True, dtype=dtype)
    head: Any = load_head(folder)
    return head.to(dtype or torch.float32)


def processor(entry: Entry, folder: Path) -> Any:
    """The Janus processor; for a head, that of its target."""
    if entry.sees != "target-states":
        return load_processor(folder, sees=True)
    assert entry.target is not None
    return load_processor(path(entry.target), sees=True)
