"""Load the bundled language checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.drafters.neural.aasd import AASD_HEAD
from mmspec.drafters.neural.elastic_head import ELASTIC_HEAD
from mmspec.drafters.neural.feature_head import EAGLE3_HEAD, FEATURE_HEAD, state_head
from mmspec.drafters.neural.hydra import HYDRA_HEADS
from mmspec.drafters.neural.kangaroo import KANGAROO_ADAPTER
from mmspec.drafters.neural.multi_token import MEDUSA_HEADS
from mmspec.drafters.neural.semi_autoregressive import SEMI_AUTOREGRESSIVE_HEAD
from mmspec.modality import Entry
from mmspec.models.heads.dream import DreamHead
from mmspec.models.loading import load_model
from mmspec.recipe import STATES
from mmspec.zoo.catalogue import load_folder, load_processor, path

KINDS = (
    *(EAGLE3_HEAD, FEATURE_HEAD, HYDRA_HEADS, MEDUSA_HEADS),
    *(ELASTIC_HEAD, KANGAROO_ADAPTER, AASD_HEAD, state_head("DREAM head", DreamHead)),
    SEMI_AUTOREGRESSIVE_HEAD,
)


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """Load a model of transformers, or a head for one."""
    kind = next((one for one in KINDS if one.owns(folder)), None)
    if kind is not None:
        head: Any = load_model(kind.maker, folder, kind.description, dtype or torch.float32)
        return head.train(False)
    return load_folder(folder, entry.sees == "pixels", dtype)


def processor(entry: Entry, folder: Path) -> Any:
    """Load the processor of a multimodal model or of a head's target, or a text tokenizer."""
    if entry.sees == STATES:
        assert entry.target is not None
        return load_processor(path(entry.target), sees=True)
    return load_processor(folder, entry.sees == "pixels")
