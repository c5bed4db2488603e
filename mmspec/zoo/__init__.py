"""Bundled zoo: a procedural Scene world and small trained checkpoints; nothing is downloaded.

from mmspec import zoo

target, drafter = zoo.load("llava"), zoo.load("llava-drafter")
processor = zoo.processor("llava")
"""

from typing import TYPE_CHECKING

from mmspec._attributes import attach_lazily

if TYPE_CHECKING:
    from mmspec.modality import Entry
    from mmspec.zoo.catalogue import (
        bundled_scene,
        drafter_for,
        info,
        is_present,
        load,
        modality,
        name_of,
        names,
        path,
        processor,
        vae,
    )
    from mmspec.zoo.heads import train_heads
    from mmspec.zoo.training import train

__all__ = [
    "Entry",
    "bundled_scene",
    "drafter_for",
    "info",
    "is_present",
    "load",
    "modality",
    "name_of",
    "names",
    "path",
    "processor",
    "train",
    "train_heads",
    "vae",
]

_CATALOGUE = (
    *("bundled_scene", "drafter_for", "info", "is_present", "modality", "name_of", "names", "path"),
)
_HOMES = {
    "Entry": "mmspec.modality",
    **dict.fromkeys(_CATALOGUE, "mmspec.zoo.catalogue"),
    **dict.fromkeys(("load", "processor", "vae"), "mmspec.zoo.catalogue"),
    "train": "mmspec.zoo.training",
    "train_heads": "mmspec.zoo.heads",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach_lazily(__name__, _HOMES)
