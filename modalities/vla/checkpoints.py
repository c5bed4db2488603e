"""Load the bundled policy and its draft heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.modality import Entry
from mmspec.models.heads.action_slots import ActionSlots, ActionSlotsConfig
from mmspec.models.heads.feature_head import load_head
from mmspec.models.loading import load_model, model_type
from mmspec.models.prismatic import register
from mmspec.zoo.catalogue import load_folder, load_processor, path


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """An OpenVLA, or a head on its states: a `FeatureHead` or `ActionSlots`."""
    if entry.target is None:
        register()
        return load_folder(folder, sees=True, dtype=dtype)
    is_slots = model_type(folder) == ActionSlotsConfig.model_type
    head: Any = (
        load_model(ActionSlots, folder, "set of action slots") if is_slots else load_head(folder)
    )
    return head.to(dtype or torch.float32)


def processor(entry: Entry, folder: Path) -> Any:
    """The processor of the policy; for a head, that of its target."""
    register()
    owner = folder if entry.target is None else path(entry.target)
    return load_processor(owner, sees=True)
