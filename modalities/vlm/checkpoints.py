"""Load the language checkpoints of the zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.drafters.neural.feature_head import EAGLE3_HEAD, FEATURE_HEAD
from mmspec.drafters.neural.hydra import HYDRA_HEADS
from mmspec.drafters.neural.multi_token import MEDUSA_HEADS
from mmspec.modality import Entry
from mmspec.models.reading import read
from mmspec.recipe import STATES
from mmspec.zoo.catalogue import path
from mmspec.zoo.loading import load_folder, load_processor

KINDS = (EAGLE3_HEAD, FEATURE_HEAD, HYDRA_HEADS, MEDUSA_HEADS)


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A model of transformers, of a class that takes pictures where it sees them; or a head."""
    kind = next((one for one in KINDS if one.owns(folder)), None)
    if kind is not None:
        head: Any = read(kind.maker, folder, kind.words, dtype or torch.float32)
        return head.train(False)
    return load_folder(folder, entry.sees == "pixels", dtype)


def processor(entry: Entry, folder: Path) -> Any:
    """The processor of a model that sees, the tokenizer of one that does not; a head's target's."""
    if entry.sees == STATES:
        assert entry.target is not None
        return load_processor(path(entry.target), sees=True)
    return load_processor(folder, entry.sees == "pixels")
