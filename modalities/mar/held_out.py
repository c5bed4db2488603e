"""Held-out requests to the bundled MAR models, and the facts that their pictures are judged by."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from mmspec.zoo.reading import read_all
from mmspec.zoo.scene import COLOURS, SHAPES, Thing

LABELS = tuple(f"{colour} {shape}" for shape in SHAPES for colour in COLOURS)


def label(thing: Thing) -> str:
    """The class of a picture that shows this thing alone."""
    return f"{thing.colour} {thing.name}"


def classes(count: int, seed: int = 0) -> list[int]:
    """Classes to draw, spread over all."""
    return [(37 * (seed + index)) % len(LABELS) for index in range(count)]


def facts_of(asked: Sequence[int], images: Sequence[Image.Image]) -> list[tuple[int, int]]:
    """Facts right and facts judged of each picture: whether it shows its class and nothing else."""
    return [
        (int([label(thing) for thing in scene.things] == [LABELS[number]]), 1)
        for number, scene in zip(asked, read_all(images), strict=True)
    ]
