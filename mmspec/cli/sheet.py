"""Pictures side by side with a few words below each: what demos write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIDE, MARGIN, LINE = 144, 8, 13  # pixels


@dataclass(frozen=True)
class Panel:
    """A picture and the lines below it."""

    picture: Image.Image
    words: tuple[str, ...]


def sheet(columns: Mapping[str, Sequence[Panel]], titles: Sequence[str]) -> Image.Image:
    """A row per title, a named column per way to draw; all panels have as many lines."""
    lines = max(len(panel.words) for column in columns.values() for panel in column)
    wide, high = SIDE + MARGIN, SIDE + (2 + lines) * LINE + MARGIN
    size = (MARGIN + wide * len(columns), LINE + MARGIN + high * len(titles))
    made = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(made)
    for place, (name, column) in enumerate(columns.items()):
        left = MARGIN + place * wide
        pen.text((left, 2), name[:24], fill="black")
        for index, panel in enumerate(column):
            top = LINE + MARGIN + index * high
            if place == 0:
                pen.text((left, top), titles[index], fill="black")
            picture = panel.picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)
            made.paste(picture, (left, top + LINE))
            for line, words in enumerate(panel.words):
                place_y = top + LINE * (1 + line) + SIDE + 1
                pen.text((left, place_y), words[:26], fill="#555555")
    return made
