"""Load the picture-token checkpoints of the zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.modality import Entry
from mmspec.models.heads.feature_head import load_head
from mmspec.zoo.catalogue import path
from mmspec.zoo.loading import load_folder, load_processor


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A Janus, or the `FeatureHead` that continues the states of one."""
    if entry.sees != "target-states":
        return load_folder(folder, sees=True, dtype=dtype)
    head: Any = load_head(folder)
    return head.to(dtype or torch.float32)


def processor(entry: Entry, folder: Path) -> Any:
    """The processor of Janus; of a head, that of its target."""
    if entry.sees != "target-states":
        return load_processor(folder, sees=True)
    assert entry.target is not None
    return load_processor(path(entry.target), sees=True)
