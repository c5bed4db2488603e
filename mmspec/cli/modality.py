"""Which kind of model a command is about."""

from __future__ import annotations

from pathlib import Path

from mmspec.cli import easel
from mmspec.cli import inputs as given

DIFFUSION, IMAGE = "diffusion", "image"
MODALITIES = (DIFFUSION, IMAGE)


def modality_of(modality: str | None, model: str, recipe: str | None = None) -> str | None:
    """What was said, or what is clear from the model or the recipe; None for language models.

    A model that both writes and draws writes, unless told otherwise. Raises ValueError for a
    modality that is not known.
    """
    if modality not in (None, *MODALITIES):
        raise ValueError(
            f"--modality {modality} is not known; give {' or '.join(MODALITIES)}, or nothing for "
            "language models"
        )
    if modality is not None:
        return modality
    if model.startswith("zoo:") and model != given.MODEL:
        from mmspec import zoo

        kind = zoo.modality(model.removeprefix("zoo:")).name
        kind = IMAGE if kind == easel.MODEL_TYPE else kind
        return kind if kind in MODALITIES else None
    if Path(model).exists():
        return _of_folder(Path(model))
    if recipe is None:
        return None
    from mmspec import recipes

    return DIFFUSION if recipes.get(recipe).decodes == "latents" else None


def _of_folder(folder: Path) -> str | None:
    if (folder / "model_index.json").exists():
        return DIFFUSION
    if not (folder / "config.json").exists():
        return None
    import json

    from mmspec.modalities.image.families import FAMILIES

    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    if kind == easel.MODEL_TYPE:
        return IMAGE
    family = FAMILIES.get(kind)
    return IMAGE if family is not None and not family.writes else None
