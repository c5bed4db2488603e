"""A picture of how a picture was drawn: every patch in the colour of the round it came in."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw

CELL, EDGE, BAR = 36, 8, 10  # pixels
RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))  # dark = early


def steps_map(rounds: Sequence[Sequence[int]]) -> Image.Image:
    """Draw the rounds (H, W) of a picture's cells; below it what the colours mean.

    Round 0 is the prompt's own forward, every later one a call of the target.
    """
    last = max(max(row) for row in rounds)
    width, height = CELL * len(rounds[0]), CELL * len(rounds)
    wide = max(width, 9 * CELL // 2) + 2 * EDGE
    made = Image.new("RGB", (wide, height + 4 * EDGE + BAR + 12), "white")
    pen = ImageDraw.Draw(made)
    for y, row in enumerate(rounds):
        for x, turn in enumerate(row):
            box = (EDGE + CELL * x, EDGE + CELL * y, EDGE + CELL * x + 34, EDGE + CELL * y + 34)
            pen.rectangle(box, fill=colour(turn, last))
            ink = "white" if turn < 0.6 * last or not last else "black"
            pen.text((box[0] + CELL // 2, box[1] + CELL // 2), str(turn), fill=ink, anchor="mm")
    _legend(pen, last, sum(map(len, rounds)), height + 2 * EDGE, wide)
    return made


def colour(turn: int, last: int) -> tuple[int, int, int]:
    """The colour of a round on a ramp from dark to light."""
    place = (len(RAMP) - 1) * (turn / last if last else 0.0)
    low = min(int(place), len(RAMP) - 2)
    share = place - low
    red, green, blue = (
        round(a + share * (b - a)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True)
    )
    return red, green, blue


def _legend(pen: ImageDraw.ImageDraw, last: int, cells: int, top: int, wide: int) -> None:
    for x in range(EDGE, wide - EDGE):
        share = (x - EDGE) / (wide - 2 * EDGE)
        pen.line([(x, top), (x, top + BAR)], fill=colour(round(share * last), last))
    pen.text((EDGE, top + BAR + 3), "round 0", fill="black")
    words = f"{last}, for {cells} codes"
    pen.text((wide - EDGE, top + BAR + 3), words, fill="black", anchor="ra")
