"""Pipelines of diffusers."""

from __future__ import annotations

from pathlib import Path

from mmspec.modalities.diffusion.settings import DiffusionSettings
from mmspec.modality import PICTURE_FILES, Entry, Modality, Source

_TRAINER = "mmspec.modalities.diffusion.zoo.train"
ZOO = (
    Entry(
        "diffusion",
        "PixArt: diffusion transformer of 10 layers, T5 encoder, 48 x 48 pictures from a prompt.",
        _TRAINER,
        drafter="diffusion-drafter",
        settings={"steps": 100, "guidance": 2.0, "words": 40},
    ),
    Entry(
        "diffusion-drafter",
        "PixArt transformer of 2 layers; reads the states of its target's encoder.",
        _TRAINER,
        target="diffusion",
    ),
)


def owns(source: Source) -> bool:
    """Pipelines, and single denoisers: of diffusers, so with a class but without a model type."""
    if source.checkpoint is not None:
        return source.checkpoint in {entry.name for entry in ZOO}
    is_folder = isinstance(source.given, str | Path)
    of_diffusers = is_folder and source.model_type is None and bool(source.classes)
    return of_diffusers or not {"DiffusionPipeline", "ModelMixin"}.isdisjoint(source.classes)


MODALITY = Modality(
    name="diffusion",
    decodes="latents",
    recipe="accelerated-diffusion-carried",
    settings=DiffusionSettings,
    plug="mmspec.modalities.diffusion.plug",
    asking="mmspec.modalities.diffusion.asking",
    measures="mmspec.modalities.diffusion.measures",
    owns=owns,
    zoo=ZOO,
    files=PICTURE_FILES,
    parts=("window", "tree", "max_rows"),
    plain=("paradigms", {"window": 1}),
)
