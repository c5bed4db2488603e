"""A picture as it came: one frame per round, cells that are still open in grey."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

GREY = (128, 128, 128)


def frames(picture: Image.Image, rounds: Sequence[Sequence[int]], last: int) -> list[Image.Image]:
    """The picture after each round 0 .. `last`; `rounds` (H, W) say when each cell came.

    Cells look as in the whole picture, for they are cut out of it: a decoder sees its surroundings,
    so while a picture is drawn (`Round.partial`) edges beside open cells may still be another.
    """
    return [_until(picture.convert("RGB"), rounds, turn) for turn in range(last + 1)]


def _until(picture: Image.Image, rounds: Sequence[Sequence[int]], turn: int) -> Image.Image:
    open_cells = Image.new("L", (len(rounds[0]), len(rounds)))
    open_cells.putdata([255 * (came > turn) for row in rounds for came in row])
    made = picture.copy()
    made.paste(GREY, mask=open_cells.resize(picture.size, Image.Resampling.NEAREST))
    return made
