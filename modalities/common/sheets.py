"""Pictures side by side: a sheet of one prompt, or one with a few words below each picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from textwrap import wrap
from typing import Any

from PIL import Image, ImageDraw

from mmspec.modalities.common.formatting import checked

SIDE, MARGIN, LINE = 144, 8, 13  # pixels
LETTERS = 24  # of a line above a panel
MOST = 64  # pictures of a sheet that are drawn as one batch


def sides(option: str, typed: str, example: str) -> tuple[int, int]:
    """Rows and columns, typed as 4x4. Raises ValueError for what is no size."""
    found = typed.lower().split("x")
    if len(found) != 2 or not all(side.isdigit() and int(side) for side in found):
        raise ValueError(f"{option} {typed} is no size; give rows and columns, such as {example}")
    return int(found[0]), int(found[1])


def rows_and_columns(grid: str | None) -> tuple[int, int]:
    """Of a sheet of pictures; one if nothing is said. Raises ValueError for too many."""
    if grid is None:
        return 1, 1
    rows, columns = sides("--grid", grid, "4x4")
    if rows * columns > MOST:
        raise ValueError(
            f"--grid {grid} is a sheet of {rows * columns} pictures, drawn as one batch; {MOST} "
            f"are the most. For the size of one picture, if the model has --codes, give --codes "
            f"{grid}"
        )
    return rows, columns


class SheetFormatter:
    """Asks for pictures: a sheet of each prompt, shown as one file."""

    sheet: tuple[int, int]  # rows and columns
    sampling: dict[str, Any]  # arguments of every call

    def sheets_of(self, prompts: Sequence[str]) -> list[str]:
        """Every prompt as often as a sheet has room. Raises ValueError for an empty one."""
        return [one for one in checked(prompts) for _ in range(prod(self.sheet))]

    def text(self, output: Any) -> None:
        """None: a picture says nothing."""
        return None

    def data(self, output: Any) -> dict[str, Any]:
        """How the pictures were sampled."""
        return {"settings": self.sampling}

    def render(self, output: Any, path: Path) -> tuple[Path, ...]:
        """A sheet of the pictures."""
        tiled(output.images, self.sheet[1]).save(path)
        return (path,)


@dataclass(frozen=True)
class Panel:
    """A picture and the lines below it."""

    picture: Image.Image
    words: tuple[str, ...]


def sheet(columns: Mapping[str, Sequence[Panel]], titles: Sequence[str]) -> Image.Image:
    """A row per title, a named column per way to draw; all panels have as many lines."""
    lines = max(len(panel.words) for column in columns.values() for panel in column)
    names = ["\n".join(wrap(name, LETTERS)) for name in columns]
    header = MARGIN + LINE * max(name.count("\n") + 1 for name in names)
    wide, high = SIDE + MARGIN, SIDE + (2 + lines) * LINE + MARGIN
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
            picture = panel.picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)
            made.paste(picture, (left, top + LINE))
            for line, words in enumerate(panel.words):
                place_y = top + LINE * (1 + line) + SIDE + 1
                pen.text((left, place_y), words[:26], fill="#555555")
    return made


def tiled(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Pictures of one size in rows of `columns`; a single one as it is."""
    if len(pictures) == 1:
        return pictures[0]
    from torchvision.transforms.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import make_grid

    tiles = [pil_to_tensor(picture.convert("RGB")) for picture in pictures]
    made: Image.Image = to_pil_image(make_grid(tiles, columns, padding=2, pad_value=255))
    return made
