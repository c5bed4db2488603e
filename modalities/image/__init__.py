"""Models that generate images as discrete image tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from mmspec.modalities.common import TOKEN_PLACEMENT
from mmspec.modality import PICTURE_FILES, Entry, Modality, Source, setting

GROUP = "mmspec.drawing_models"
_MODEL_TYPES = ("emu3", "janus", "llamagen")
_CHAMELEON_CLASS = "ChameleonForImageGeneration"  # transformers' own Chameleon only writes


def read_entry_points() -> tuple[EntryPoint, ...]:
    """Image models of other packages, named by `model_type`; each refers to a `DrawingModel`."""
    return _read_entry_points(tuple(sys.path))


@lru_cache(maxsize=4)
def _read_entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Cached per search path, because it reads the metadata of every installed package."""
    return tuple(entry_points(group=GROUP))


def owns(source: Source) -> bool:
    """Families with image tokens; Chameleon only in the class that generates images."""
    kinds = (*_MODEL_TYPES, *(point.name for point in read_entry_points()))
    return source.model_type in kinds or _CHAMELEON_CLASS in source.classes


@dataclass(frozen=True)
class ImageSettings:
    """Sampling, image size, and what the commands write and score."""

    temperature: float = setting(1.0, "0 is greedy.", min=0)
    guidance: float | None = setting(None, "Default: the published scale; 1 = none.", min=0)
    codes: str | None = setting(
        None, "Size of one image in codes, rows x columns as in 24x24, if it can vary."
    )
    grid: str | None = setting(None, "A grid of images, as in 4x4.", only="generate")
    steps_map: str | None = setting(
        None,
        "File for a map of the round in which each patch was accepted.",
        only="generate",
        writes=PICTURE_FILES,
    )
    animation: str | None = setting(
        None,
        "File for an animation of the generation, one frame per round.",
        only="generate",
        writes=(".gif", ".webp"),
    )
    pictures: int = setting(
        128,
        "Number of images that are scored; 0 = those that are timed.",
        min=0,
        max=100_000,
        only="bench",
    )


MODALITY = Modality(
    name="image",
    decodes="tokens",
    recipe="mc-sjd-gumbel",
    example_prompt="a large red circle",
    settings=ImageSettings,
    package=__name__,
    owns=owns,
    zoo=Entry.read_entries(__name__),
    files=PICTURE_FILES,
    offers=("image tokens", "codebook"),
    placement=TOKEN_PLACEMENT,
    parts=("compressor", "tree", "length", "sees", "processor"),
)
