"""Load the policy of the zoo, and the head that drafts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.modality import Entry
from mmspec.models.heads.feature_head import load_head
from mmspec.models.prismatic import register
from mmspec.zoo.catalogue import path
from mmspec.zoo.loading import load_folder, load_processor


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """An OpenVLA, or the `FeatureHead` that continues the states of one."""
    if entry.target is None:
        register()
        return load_folder(folder, sees=True, dtype=dtype)
    head: Any = load_head(folder)
    return head.to(dtype or torch.float32)


def processor(entry: Entry, folder: Path) -> Any:
    """The processor of the policy; of a head, that of its target."""
    register()
    whose = folder if entry.target is None else path(entry.target)
    return load_processor(whose, sees=True)
