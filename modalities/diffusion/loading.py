"""Diffusers pipelines from folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.models.loading import load_pipeline as load_any_pipeline


def load_pipeline(source: str | Path, trust_remote_code: bool = False) -> Any:
    """A pipeline from a folder, a hub name, or "zoo:NAME"; safetensors only.

    Raises ValueError where a folder is meant and there is none.
    """
    name = str(source)
    if name.startswith("zoo:"):
        return zoo.load(name.removeprefix("zoo:"))
    return load_any_pipeline(name, trust_remote_code=trust_remote_code)
