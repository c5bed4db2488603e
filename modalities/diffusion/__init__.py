"""Pipelines of diffusers."""

from mmspec.modalities.diffusion.settings import Settings
from mmspec.modality import Modality, Source


def owns(source: Source) -> bool:
    """Whether a model belongs here."""
    return "DiffusionPipeline" in source.classes


MODALITY = Modality(
    name="diffusion",
    decodes="latents",
    recipe="asd",
    drafted=None,
    settings=Settings,
    plug="mmspec.modalities.diffusion.plug",
    measures="mmspec.modalities.diffusion.measures",
    owns=owns,
    parts=("window", "tree", "max_rows"),
    plain=("paradigms", {"window": 1}),
)
