"""Diffusers pipelines and draft pipelines from folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.modalities.diffusion.network import Network
from mmspec.modalities.families import is_pipeline


def load_pipeline(source: str | Path, trust_remote_code: bool = False) -> Any:
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
    return DiffusionPipeline.from_pretrained(
        name, use_safetensors=True, trust_remote_code=trust_remote_code
    )


def load_draft(pipe: Any, source: str | Path, trust_remote_code: bool = False) -> Any:
    """A draft pipeline for `pipe`; a denoising network alone works between the target's parts."""
    from diffusers import AutoModel

    if (Path(source) / "config.json").exists():
        how = {"use_safetensors": True, "trust_remote_code": trust_remote_code}
        found = AutoModel.from_pretrained(str(source), **how).eval()
    else:
        found = load_pipeline(source, trust_remote_code)
    return found if is_pipeline(found) else between(pipe, found)


def between(pipe: Any, network: Any) -> Any:
    """A pipeline of another network and otherwise the parts of `pipe`."""
    small = type(pipe)(**{**pipe.components, Network(pipe).name: network})
    small.set_progress_bar_config(**getattr(pipe, "_progress_bar_config", {}))
    return small
