"""The bundled checkpoints of all modalities: names, folders, loading. Nothing is downloaded.

The module that `Entry.loader` names loads a checkpoint: it has `load(entry, folder, dtype)` and
`processor(entry, folder)`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec import registry
from mmspec.modality import Entry, Modality

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderTiny
    from transformers import PreTrainedModel

    from mmspec.recipe import Recipe

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Return the names of all checkpoints."""
    return tuple(entry.name for one in registry.modalities().values() for entry in one.zoo)


def info(name: str) -> Entry:
    """Return the entry of a checkpoint; `name` may be an alias, such as "vlm"."""
    return _find_entry(name)[0]


def modality(name: str) -> Modality:
    """Return the modality of a checkpoint."""
    return _find_entry(name)[1]


def path(name: str) -> Path:
    """Return the folder of a checkpoint, in the format of transformers or diffusers.

    Checkpoints of other packages are in the folder "checkpoints" next to their loader.
    """
    entry = info(name)
    if entry.loader.startswith("mmspec."):
        return FOLDER / "checkpoints" / entry.name
    spec = find_spec(entry.loader)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "checkpoints" / entry.name


def name_of(folder: str | Path) -> str | None:
    """Return the `zoo:NAME` of the checkpoint in a folder; None for any other folder."""
    return next((registry.ZOO + one for one in names() if path(one) == Path(folder)), None)


def is_present(name: str) -> bool:
    """Whether a checkpoint has been trained: its folder holds a model or a pipeline."""
    return holds_model(path(name))


def holds_model(folder: Path) -> bool:
    """Whether a folder holds a model or a pipeline."""
    return any((folder / file).exists() for file in ("config.json", "model_index.json"))


def drafter_for(model: str, recipe: Recipe) -> str | None:
    """Return the `zoo:NAME` of a draft model for the target `zoo:NAME` and a recipe.

    Preferred is one that names the recipe, then one that names none, and of these one whose `sees`
    equals that of the recipe. None if no draft model fits, the recipe takes none, or the target is
    not a bundled checkpoint.
    """
    if not recipe.takes_drafter or not model.startswith(registry.ZOO):
        return None
    target = info(model)
    small = [one for one in map(info, names()) if one.target == target.name]
    fits = [one for one in small if any(kind.owns(path(one.name)) for kind in recipe.draft_model)]
    fits.sort(
        key=lambda one: (
            *(recipe.name not in one.recipes, bool(one.recipes)),
            *(one.sees != recipe.sees, one.name != target.drafter),
        )
    )
    return registry.ZOO + fits[0].name if fits else None


def bundled_scene() -> Path:
    """Return the path of an example image: a PNG of 256 x 256 pixels."""
    return FOLDER / "scene.png"


def load(name: str, dtype: torch.dtype | None = None) -> Any:
    """Load a model in eval mode; default dtype: float32 (the files hold float16).

    A diffusers pipeline for a diffusion target, its denoiser alone for a drafter; a head for a
    drafter that sees the states of its target; `mmspec.models` classes for MAR.
    """
    entry = info(name)
    return import_module(entry.loader).load(entry, path(name), dtype)


def processor(name: str) -> Any:
    """Load the processor of a multimodal model, or the tokenizer of a text-only drafter.

    A head has the processor of its target. Raises ValueError for models that have none.
    """
    entry = info(name)
    return import_module(entry.loader).processor(entry, path(name))


def vae(name: str, dtype: torch.dtype | None = None) -> AutoencoderTiny:
    """Load the autoencoder that decodes the latents of a model; a drafter has that of its target.

    Raises ValueError for a checkpoint without one.
    """
    entry = info(name)
    folder = path(entry.target or entry.name)
    if not (folder / "vae").exists():
        known = ", ".join(one for one in names() if (path(one) / "vae").exists())
        raise ValueError(f"{entry.name} has no autoencoder of its own; choose one of: {known}")
    return load_vae(folder, dtype)


def load_folder(folder: Path, sees: bool, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model of transformers; `sees` selects `AutoModelForImageTextToText`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model: PreTrainedModel = load_pretrained(
        AutoModelForImageTextToText if sees else AutoModelForCausalLM, folder, dtype
    )
    return model


def load_processor(folder: Path, sees: bool) -> Any:
    """Load the processor of a model of transformers, or its tokenizer if it does not see.

    `AutoTokenizer` is not used: for some model types it ignores the files and loses tokens.
    """
    from transformers import AutoProcessor, PreTrainedTokenizerFast

    kind: Any = AutoProcessor if sees else PreTrainedTokenizerFast
    return kind.from_pretrained(folder, local_files_only=True)


def load_vae(folder: Path, dtype: torch.dtype | None = None) -> AutoencoderTiny:
    """Load the autoencoder in the folder of a model or pipeline."""
    from diffusers import AutoencoderTiny

    coder: AutoencoderTiny = load_pretrained(AutoencoderTiny, folder / "vae", dtype)
    return coder


def load_pretrained(kind: Any, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """Load a model of the given class in eval mode; default dtype: float32."""
    import torch

    model = kind.from_pretrained(folder, dtype=dtype or torch.float32, local_files_only=True)
    return model.train(False)


def _find_entry(name: str) -> tuple[Entry, Modality]:
    full = registry.checkpoint(name)
    return next(
        (entry, one)
        for one in registry.modalities().values()
        for entry in one.zoo
        if entry.name == full
    )
