"""Load the bundled MAR checkpoints; their classes and how their images are scored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mmspec.modality import Entry
from mmspec.models.mar import MarForImageGeneration
from mmspec.zoo.catalogue import load_pretrained
from mmspec.zoo.scene import COLOURS, SHAPES, Thing
from mmspec.zoo.scene_parser import parse_images

LABELS = tuple(f"{colour} {shape}" for shape in SHAPES for colour in COLOURS)


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """The MAR model in a folder."""
    return load_pretrained(MarForImageGeneration, folder, dtype)


def processor(entry: Entry, folder: Path) -> Any:
    """Raises ValueError: MAR models have no processor."""
    raise ValueError(
        f"{entry.name} is conditioned on classes and has no processor; give classes to "
        f'generate_images(), and vae=mmspec.zoo.vae("{entry.target or entry.name}") for pixels'
    )


def label(thing: Thing) -> str:
    """The class of an image of this thing."""
    return f"{thing.colour} {thing.name}"


def classes(count: int, seed: int = 0) -> list[int]:
    """Held-out class numbers, spread over all classes."""
    return [(37 * (seed + index)) % len(LABELS) for index in range(count)]


def facts_of(labels: Sequence[int], images: Sequence[Image.Image]) -> list[tuple[int, int]]:
    """Correct and total facts of each image: whether it shows its class and nothing else."""
    return [
        (int([label(thing) for thing in scene.things] == [LABELS[number]]), 1)
        for number, scene in zip(labels, parse_images(images), strict=True)
    ]
