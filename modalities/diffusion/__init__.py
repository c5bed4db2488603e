"""Diffusion pipelines of diffusers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmspec.modality import PICTURE_FILES, Entry, Modality, Source, setting


def owns(source: Source) -> bool:
    """Pipelines and single denoisers of diffusers, which have a class but no model type."""
    is_folder = isinstance(source.given, str | Path)
    of_diffusers = is_folder and source.model_type is None and bool(source.classes)
    return of_diffusers or not {"DiffusionPipeline", "ModelMixin"}.isdisjoint(source.classes)


@dataclass(frozen=True)
class DiffusionSettings:
    """Sampling settings; defaults are the pipeline's."""

    steps: int | None = setting(None, "Steps of the scheduler.", min=2)
    guidance: float | None = setting(None, "Guidance scale.", min=0)
    words: int | None = setting(None, "Maximum number of prompt tokens.", min=1, max=4096)
    grid: str | None = setting(None, "A grid of images, as in 4x4.", only="generate")


MODALITY = Modality(
    name="diffusion",
    decodes="latents",
    recipe="accelerated-diffusion-carried",
    example_prompt="a large red circle",
    settings=DiffusionSettings,
    package=__name__,
    owns=owns,
    zoo=Entry.read_entries(__name__),
    files=PICTURE_FILES,
    parts=("window", "tree", "max_rows", "sampler"),
    plain=("paradigms", {"window": 1}),
    survey="mmspec.modalities.diffusion.survey",
    placement=("device", "dtype", "device_map", "quantize"),
)
