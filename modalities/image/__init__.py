"""Models that draw with picture tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from mmspec.modality import PICTURE_FILES, Entry, Modality, Source, setting

GROUP = "mmspec.drawing_models"
_KINDS = ("emu3", "janus", "llamagen")
_DRAWS = "ChameleonForImageGeneration"  # transformers' own Chameleon only writes


def strangers() -> tuple[EntryPoint, ...]:
    """Drawing models of other packages: by `model_type`, each leads to a `DrawingModel`."""
    return _installed(tuple(sys.path))


@lru_cache(maxsize=4)
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Reads the metadata of every installed package, so once for a search path."""
    return tuple(entry_points(group=GROUP))


def owns(source: Source) -> bool:
    """Families with picture tokens; Chameleon only in the class that draws."""
    kinds = (*_KINDS, *(point.name for point in strangers()))
    return source.model_type in kinds or _DRAWS in source.classes


@dataclass(frozen=True)
class ImageSettings:
    """How freely and how large to draw, and what to show and to judge."""

    temperature: float = setting(1.0, "0 is greedy.", min=0)
    guidance: float | None = setting(None, "The published scale if not said, 1 = none.", min=0)
    codes: str | None = setting(
        None, "Size of one picture in codes, rows x columns as in 24x24, if it can vary."
    )
    grid: str | None = setting(None, "A sheet of pictures, as in 4x4.", only="generate")
    steps_map: str | None = setting(
        None,
        "A file for a map of the round each patch came in.",
        only="generate",
        writes=PICTURE_FILES,
    )
    animation: str | None = setting(
        None,
        "A file for the picture as it comes, a frame per round.",
        only="generate",
        writes=(".gif", ".webp"),
    )
    pictures: int = setting(
        128, "How many the judge looks at; 0 = those that are timed.", min=0, only="bench"
    )


MODALITY = Modality(
    name="image",
    decodes="tokens",
    recipe="mc-sjd-gumbel",
    settings=ImageSettings,
    package=__name__,
    owns=owns,
    zoo=Entry.read_entries(__name__),
    files=PICTURE_FILES,
    parts=("compressor", "tree", "length", "sees", "processor"),
)
