"""Load models of tokens, and their draft models, where a `Placement` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec import zoo
from mmspec.models.loading import load_causal
from mmspec.registry import ZOO


def load_token_model(source: str | Path, maker: Any = None, **options: Any) -> Any:
    """Load a model from a folder, a hub name, or "zoo:NAME" (in float32 unless placed otherwise).

    Raises ValueError as `load_causal` does.
    """
    name = str(source)
    if not name.startswith(ZOO):
        return load_causal(name, maker=maker, **options)
    if "placement" not in options:
        return zoo.load(name.removeprefix(ZOO))
    return load_causal(zoo.path(name.removeprefix(ZOO)), torch.float32, maker, **options)
