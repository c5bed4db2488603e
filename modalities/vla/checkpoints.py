"""Load the policy of the zoo, and the heads that draft for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.modality import Entry
from mmspec.models.heads.action_slots import ActionSlots, ActionSlotsConfig
from mmspec.models.heads.feature_head import load_head
from mmspec.models.loading import model_type
from mmspec.models.prismatic import register
from mmspec.models.reading import read
from mmspec.zoo.catalogue import path
from mmspec.zoo.loading import load_folder, load_processor


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """An OpenVLA, or what drafts by the states of one: a `FeatureHead`, or `ActionSlots`."""
    if entry.target is None:
        register()
        return load_folder(folder, sees=True, dtype=dtype)
    is_slots = model_type(folder) == ActionSlotsConfig.model_type
    head: Any = read(ActionSlots, folder, "set of action slots") if is_slots else load_head(folder)
    return head.to(dtype or torch.float32)


def processor(entry: Entry, folder: Path) -> Any:
    """The processor of the policy; of a head, that of its target."""
    register()
    whose = folder if entry.target is None else path(entry.target)
    return load_processor(whose, sees=True)
