"""Models from folders, and accelerated models to and from disk.

Weights load from safetensors only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mmspec import recipes
from mmspec.codes.resampling import Trained
from mmspec.drafters.neural import massv
from mmspec.drafters.neural.feature_head import FeatureDraft
from mmspec.drafters.rows.upsampled import Upsampled
from mmspec.models import code_resampler
from mmspec.models.heads.feature_head import FeatureHeadConfig, load_head
from mmspec.recipe import Recipe

FILE = "mmspec.json"


def load_model(source: str | Path, dtype: torch.dtype | str = "auto", **arguments: Any) -> Any:
    """Load a causal or vision-language model from a folder, a hub name, or "zoo:NAME".

    A folder of a feature head gives a `mmspec.models.heads.feature_head.FeatureHead`.
    Raises ValueError for a folder whose weights are pickled: unpickling runs code.
    """
    name = str(source)
    if name.startswith("zoo:"):
        from mmspec import zoo

        return zoo.load(name.removeprefix("zoo:"))
    folder = Path(name)
    if folder.is_dir():
        _refuse_pickle(folder)
        if _model_type(folder) == FeatureHeadConfig.model_type:
            return load_head(folder)
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION,
    )

    config = transformers.AutoConfig.from_pretrained(name, **arguments)
    auto = (
        transformers.AutoModelForImageTextToText
        if config.model_type in VISION
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_pretrained(name, dtype=dtype, use_safetensors=True, **arguments)
    return model.eval()


def _model_type(folder: Path) -> str | None:
    file = folder / "config.json"
    return json.loads(file.read_text()).get("model_type") if file.exists() else None


def _refuse_pickle(folder: Path) -> None:
    if list(folder.glob("*.safetensors")):
        return
    pickled = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if pickled:
        raise ValueError(
            f"{folder} holds pickled weights ({', '.join(pickled)}), and unpickling runs code; "
            "convert them with model.save_pretrained(folder), which writes safetensors"
        )
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")


def save(fast: Any, folder: Path) -> None:
    """Write the recipe's name and options and the draft model, not the target."""
    recipe = fast.recipe
    parts = described(recipe, fast.given)
    if recipe.takes_drafter and fast.small is None:
        raise ValueError(f"{type(fast.drafter).__name__} was made by hand and cannot be saved")
    if fast.small is not None:
        small = fast.small.head if isinstance(fast.small, FeatureDraft) else fast.small.model
        small.save_pretrained(folder / "drafter")
    if "projector" in recipe.options and fast.drafter.model.sight.projector is not None:
        massv.save_projector(folder / "drafter", fast.drafter.model.sight.projector)
    if isinstance(fast.drafter, Upsampled) and isinstance(fast.drafter.sampler, Trained):
        fast.drafter.sampler.model.save_pretrained(folder / "drafter" / code_resampler.FOLDER)
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
