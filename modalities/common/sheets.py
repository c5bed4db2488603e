"""Sheets of images: a grid per prompt, or labelled panels; animations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from textwrap import wrap
from typing import Any

from PIL import Image, ImageDraw

from mmspec.modalities.common.formatting import check_prompts
from mmspec.tracing.palette import LEAST_WIDTH

SIDE, MARGIN, LINE = 144, 8, 13  # pixels
LETTERS = 24  # per line of a column title
FRAME_MS, LAST_MS = 80, 2000
MAX_IMAGES = 64  # of a sheet, which is generated as one batch


def parse_size(option: str, typed: str, example: str) -> tuple[int, int]:
    """Parse rows and columns such as "4x4". Raises ValueError for any other text."""
    found = typed.lower().split("x")
    if len(found) != 2 or not all(side.isdigit() and int(side) for side in found):
        raise ValueError(
            f"{option} {typed} is not a size; give rows and columns, such as {example}"
        )
    return int(found[0]), int(found[1])


def parse_grid(grid: str | None) -> tuple[int, int]:
    """Parse the grid of a sheet; default: one image. Raises ValueError for too many images."""
    if grid is None:
        return 1, 1
    rows, columns = parse_size("--grid", grid, "4x4")
    if rows * columns > MAX_IMAGES:
        raise ValueError(
            f"--grid {grid} is a sheet of {rows * columns} images, generated as one batch; give at "
            f"most {MAX_IMAGES}. For the size of one image, if the model has --codes, give --codes "
            f"{grid}"
        )
    return rows, columns


class SheetFormatter:
    """Base of formatters of image models: a sheet of each prompt, saved as one file."""

    sheet: tuple[int, int]  # rows and columns
    sampling: dict[str, Any]  # arguments of every call

    def repeat_prompts(self, prompts: Sequence[str]) -> list[str]:
        """Repeat every prompt for all cells of a sheet. Raises ValueError for an empty one."""
        return [one for one in check_prompts(prompts) for _ in range(prod(self.sheet))]

    def text(self, output: Any) -> None:
        """None: images have no text."""
        return None

    def data(self, output: Any) -> dict[str, Any]:
        """Return the sampling settings."""
        return {"settings": self.sampling}

    def render(self, output: Any, path: Path) -> tuple[Path, ...]:
        """Save the image, or a sheet of several, enlarged where it would be small."""
        made = tile_images(output.images, self.sheet[1])
        (made if len(output.images) == 1 else enlarge(made)).save(path)
        return (path,)


@dataclass(frozen=True)
class Panel:
    """An image and the lines below it."""

    picture: Image.Image
    lines: tuple[str, ...]


def sheet(columns: Mapping[str, Sequence[Panel]], titles: Sequence[str]) -> Image.Image:
    """Draw a row per title and a named column per method, with panels of equal height."""
    lines = max(len(panel.lines) for column in columns.values() for panel in column)
    names = ["\n".join(wrap(name, LETTERS)) for name in columns]
    header = MARGIN + LINE * max(name.count("\n") + 1 for name in names)
    side = max(SIDE, (LEAST_WIDTH - MARGIN) // len(columns) - MARGIN + 1)
    wide, high = side + MARGIN, side + (2 + lines) * LINE + MARGIN
    size = (MARGIN + wide * len(columns), header + high * len(titles))
    made = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(made)
    for place, (name, column) in enumerate(zip(names, columns.values(), strict=True)):
        left = MARGIN + place * wide
        pen.text((left, 2), name, fill="black", spacing=1)
        for index, panel in enumerate(column):
            top = header + index * high
            if place == 0:
                pen.text((left, top), titles[index], fill="black")
            picture = panel.picture.convert("RGB").resize((side, side), Image.Resampling.NEAREST)
            made.paste(picture, (left, top + LINE))
            for line, text in enumerate(panel.lines):
                y = top + LINE * (1 + line) + side + 1
                pen.text((left, y), text[:26], fill="#555555")
    return made


def tile_images(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Tile images of one size in rows of `columns`; a single image is returned unchanged."""
    if len(pictures) == 1:
        return pictures[0]
    from torchvision.transforms.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import make_grid

    tiles = [pil_to_tensor(picture.convert("RGB")) for picture in pictures]
    made: Image.Image = to_pil_image(make_grid(tiles, columns, padding=2, pad_value=255))
    return made


def enlarge(picture: Image.Image) -> Image.Image:
    """Enlarge a small image by a whole factor, to the least width of a sheet or more."""
    factor = -(-LEAST_WIDTH // picture.width)
    size = (factor * picture.width, factor * picture.height)
    return picture.resize(size, Image.Resampling.NEAREST)


def save_animation(
    file: Path, frames: Sequence[Image.Image], durations: Sequence[int] | None = None
) -> None:
    """Write frames as a looping GIF or WebP, each shown for milliseconds; the last one longer."""
    shown = [FRAME_MS] * (len(frames) - 1) if durations is None else list(durations)
    times = [*shown, LAST_MS]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=times, loop=0)
