"""Models from folders, and accelerated models to and from disk.

Weights load from safetensors only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mmspec import recipes, zoo
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.models.heads.feature_head import load_head
from mmspec.models.loading import load_causal
from mmspec.recipe import Recipe

FILE = "mmspec.json"


def load_model(source: str | Path, dtype: torch.dtype | str = "auto", **arguments: Any) -> Any:
    """Load a causal or vision-language model from a folder, a hub name, or "zoo:NAME".

    A folder of a feature head gives a `mmspec.models.heads.feature_head.FeatureHead`.
    Raises ValueError for a folder whose weights are pickled: unpickling runs code.
    """
    name = str(source)
    if name.startswith("zoo:"):
        return zoo.load(name.removeprefix("zoo:"))
    if (Path(name) / "config.json").exists() and FEATURE_HEAD.owns(Path(name)):
        return load_head(name)
    return load_causal(name, dtype, **arguments)


def save(fast: Any, folder: Path) -> None:
    """Write the recipe's name and options and the draft model, not the target."""
    recipe = fast.recipe
    parts = described(recipe, fast.given)
    if recipe.takes_drafter and fast.small is None:
        raise ValueError(f"{type(fast.drafter).__name__} was made by hand and cannot be saved")
    if fast.small is not None:
        small = fast.small
        small.kind.save(small.model, folder / "drafter", fast.backbone, fast.drafter)
    write(folder, recipe, fast.model.config._name_or_path, parts)


def described(recipe: Recipe, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parts given beside a recipe. Raises ValueError for what no file can hold."""
    if not recipe.name:
        raise ValueError(
            "only a recipe from mmspec.recipes can be saved; this one was made by hand"
        )
    parts = {name: value for name, value in given.items() if name != "projector"}
    made = [name for name, value in parts.items() if not _is_plain(value)]
    if made:
        raise ValueError(
            f"{', '.join(made)} was given as an object and cannot be saved; give a name or a number"
        )
    return parts


def write(folder: Path, recipe: Recipe, target: str | None, parts: Mapping[str, Any]) -> None:
    """Write what `restore` reads; a draft model lies in the folder "drafter" already."""
    content = {
        "recipe": recipe.name,
        "target": target or None,
        "parts": parts,
        "drafter": "drafter" if recipe.takes_drafter else None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(content, indent=2) + "\n")


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, str | int | float | bool) or value is None


def restore(folder: Path, model: Any, accelerate: Callable[..., Any]) -> Any:
    """Read what `save` wrote.

    Raises ValueError where the folder holds none, or the target is unknown.
    """
    if not (folder / FILE).exists():
        raise ValueError(f"{folder} has no {FILE}; it was not written by save_pretrained")
    content = json.loads((folder / FILE).read_text())
    if model is None:
        if not content["target"]:
            raise ValueError(f"{folder / FILE} names no target model; pass model=")
        model = _loader(content["recipe"])(content["target"])
    drafter = folder / content["drafter"] if content["drafter"] else None
    return accelerate(model, content["recipe"], drafter=drafter, **content["parts"])


def _loader(recipe: str) -> Callable[[str], Any]:
    """What loads the target of a recipe."""
    if recipes.get(recipe).decodes != "latents":
        return load_model
    from mmspec.modalities.diffusion.loading import load_pipeline

    return load_pipeline
