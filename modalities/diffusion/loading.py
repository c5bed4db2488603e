"""Diffusers pipelines from folders, draft pipelines, and accelerated ones to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.drafters.denoising.small_denoiser import DRAFT_PIPELINE
from mmspec.loading import described, write
from mmspec.modalities.diffusion.network import Network
from mmspec.models.loading import load_pipeline as load_any_pipeline


def load_pipeline(source: str | Path) -> Any:
    """A pipeline from a folder, a hub name, or "zoo:NAME"; safetensors only.

    Raises ValueError where a folder is meant and there is none.
    """
    name = str(source)
    if name.startswith("zoo:"):
        from mmspec import zoo

        return zoo.load(name.removeprefix("zoo:"))
    return load_any_pipeline(name)


def load_draft(pipe: Any, source: str | Path) -> Any:
    """A draft pipeline for `pipe`; a denoising network alone works between the target's parts."""
    name = str(source)
    if name.startswith("zoo:"):
        from mmspec import zoo

        return DRAFT_PIPELINE.load(zoo.path(name.removeprefix("zoo:")), Network(pipe))
    return DRAFT_PIPELINE.load(name, Network(pipe))


def save(fast: Any, folder: Path) -> None:
    """Write the recipe's name, the parts that were given, and the draft pipeline.

    Raises ValueError for recipes made by hand and for parts given as objects.
    """
    parts = described(fast.recipe, fast.given)
    if fast.small is not None:
        kind = fast.recipe.draft_model[0]
        kind.save(fast.small, folder / "drafter", Network(fast.pipe), None)
    write(folder, fast.recipe, fast.pipe.name_or_path, parts)
