"""A picture of what compressors leave: a line per compressor, its frames side by side.

A bright cell has a feature left, the brighter the more originals it stands for; a dark one has
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw

from mmspec.bench.studies.compressors import Thinned

CELL, GAP, WORDS, LINE = 6, 4, 150, 13  # pixels
DARK, LEFT, MERGED = (40, 44, 52), (86, 156, 214), (255, 214, 102)


def draw(lines: Mapping[str, Thinned], file: Path) -> None:
    """Write the picture. Raises ValueError where nothing was thinned."""
    if not lines:
        raise ValueError("no compressor saw a picture, so there is nothing to draw; ask about one")
    frames, rows, columns = next(iter(lines.values())).shape
    high, wide = max(rows * CELL, LINE) + GAP, columns * CELL + GAP
    made = Image.new("RGB", (WORDS + wide * frames, GAP + high * len(lines)), "white")
    pen = ImageDraw.Draw(made)
    for line, (name, one) in enumerate(lines.items()):
        top = GAP + line * high
        pen.text((GAP, top), name, fill="black")
        for at, size in enumerate(one.sizes):
            frame, cell = divmod(at, rows * columns)
            row, column = divmod(cell, columns)
            left, upper = WORDS + frame * wide + column * CELL, top + row * CELL
            pen.rectangle((left, upper, left + CELL - 2, upper + CELL - 2), _colour(size))
    made.save(file)


def _colour(size: int) -> tuple[int, int, int]:
    if size == 0:
        return DARK
    share = 1 - 1 / size
    red, green, blue = (
        round(one + share * (other - one)) for one, other in zip(LEFT, MERGED, strict=True)
    )
    return red, green, blue
