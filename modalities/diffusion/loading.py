"""Diffusers pipelines from folders, draft pipelines, and accelerated ones to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.loading import described, write
from mmspec.modalities.diffusion.network import Network
from mmspec.modalities.families import is_pipeline


def load_pipeline(source: str | Path) -> Any:
    """A pipeline from a folder, a hub name, or "zoo:NAME"; safetensors only.

    Raises ValueError where a folder is meant and there is none.
    """
    from diffusers import DiffusionPipeline

    name = str(source)
    if name.startswith("zoo:"):
        from mmspec import zoo

        return zoo.load(name.removeprefix("zoo:"))
    if not Path(name).exists() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ValueError(
            f"there is no pipeline folder {name}; give a folder, a hub name or zoo:NAME"
        )
    return DiffusionPipeline.from_pretrained(name, use_safetensors=True)


def load_draft(pipe: Any, source: str | Path) -> Any:
    """A draft pipeline for `pipe`; a denoising network alone works between the target's parts."""
    from diffusers import AutoModel

    if (Path(source) / "config.json").exists():
        found = AutoModel.from_pretrained(str(source), use_safetensors=True).eval()
    else:
        found = load_pipeline(source)
    return found if is_pipeline(found) else between(pipe, found)


def between(pipe: Any, network: Any) -> Any:
    """A pipeline of another network and otherwise the parts of `pipe`."""
    small = type(pipe)(**{**pipe.components, Network(pipe).name: network})
    small.set_progress_bar_config(**getattr(pipe, "_progress_bar_config", {}))
    return small


def save(fast: Any, folder: Path) -> None:
    """Write the recipe's name, the parts that were given, and the draft pipeline.

    Of a draft pipeline that has the target's parts only the network is written. Raises ValueError
    for recipes made by hand and for parts given as objects.
    """
    parts = described(fast.recipe, fast.given)
    if fast.small is not None:
        own, theirs = fast.pipe.components, fast.small.components
        name = Network(fast.small).name
        shared = all(part is own.get(key) for key, part in theirs.items() if key != name)
        written = theirs[name] if shared else fast.small
        written.save_pretrained(folder / "drafter", safe_serialization=True)
    write(folder, fast.recipe, fast.pipe.name_or_path, parts)
