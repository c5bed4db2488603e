"""Draw which visual tokens compressors keep: one line per compressor, frames side by side.

Blue cells have a feature left, yellower the more originals were merged into it; dark ones none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw

from mmspec.bench.studies.compressors import CompressionTrace
from mmspec.tracing.palette import LEAST_WIDTH, SKY, YELLOW, to_rgb

CELL, GAP, LABEL, LINE = 6, 4, 150, 16  # pixels
DROPPED, KEPT, MERGED = (40, 44, 52), to_rgb(SKY), to_rgb(YELLOW)


def draw(lines: Mapping[str, CompressionTrace], file: Path) -> None:
    """Write the image. Raises ValueError without compressed images."""
    if not lines:
        raise ValueError(
            "no compressor read an image, so there is nothing to draw; give a request with one"
        )
    frames, rows, columns = next(iter(lines.values())).shape
    cell = max(CELL, -(-(LEAST_WIDTH - LABEL - GAP * frames) // (columns * frames)))
    high, wide = max(rows * cell, LINE) + GAP, columns * cell + GAP
    body = GAP + LINE + high * len(lines)
    image = Image.new("RGB", (LABEL + wide * frames, body + LINE + GAP), "white")
    pen = ImageDraw.Draw(image)
    pen.text((GAP, GAP), "compressor / frame", fill="black")
    for frame in range(frames):
        pen.text((LABEL + frame * wide, GAP), str(frame + 1), fill="black")
    for line, (name, one) in enumerate(lines.items()):
        top = GAP + LINE + line * high
        pen.text((GAP, top), name, fill="black")
        for at, size in enumerate(one.sizes):
            frame, place = divmod(at, rows * columns)
            row, column = divmod(place, columns)
            left, upper = LABEL + frame * wide + column * cell, top + row * cell
            pen.rectangle((left, upper, left + cell - 2, upper + cell - 2), _colour(size))
    _name_colours(pen, body)
    image.save(file)


def _name_colours(pen: ImageDraw.ImageDraw, top: int) -> None:
    left = LABEL
    for name, colour in (("kept", KEPT), ("merged", MERGED), ("dropped", DROPPED)):
        pen.rectangle((left, top + 2, left + CELL + 2, top + CELL + 4), colour)
        pen.text((left + 2 * CELL, top), name, fill="black")
        left += LABEL // 2


def _colour(size: int) -> tuple[int, int, int]:
    if size == 0:
        return DROPPED
    share = 1 - 1 / size
    red, green, blue = (
        round(one + share * (other - one)) for one, other in zip(KEPT, MERGED, strict=True)
    )
    return red, green, blue
