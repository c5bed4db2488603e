"""Images of how an image was generated: the round of each patch as a map, or as an animation."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw

from mmspec.tracing.palette import LEAST_WIDTH

CELL, EDGE, BAR, LINE = 36, 8, 10, 12  # pixels
RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))  # dark = early
GREY = (128, 128, 128)


def render_steps_map(rounds: Sequence[Sequence[int]], title: str) -> Image.Image:
    """Map of the rounds (H, W) in which the cells were accepted, with a title and a colour legend.

    Round 0 is the prefill of the prompt; every later round is one call of the target.
    """
    last = max(max(row) for row in rounds)
    cell = max(CELL, -(-(LEAST_WIDTH - 2 * EDGE) // max(len(rounds[0]), 4)))
    width, height = cell * len(rounds[0]), LINE + cell * len(rounds)
    wide = max(width, LEAST_WIDTH - 2 * EDGE) + 2 * EDGE
    image = Image.new("RGB", (wide, height + 4 * EDGE + BAR + LINE), "white")
    pen = ImageDraw.Draw(image)
    pen.text((EDGE, EDGE // 2), title, fill="black")
    for y, row in enumerate(rounds):
        for x, number in enumerate(row):
            left, top = EDGE + cell * x, EDGE + LINE + cell * y
            box = (left, top, left + cell - 2, top + cell - 2)
            pen.rectangle(box, fill=round_colour(number, last))
            ink = "white" if number < 0.6 * last or not last else "black"
            pen.text((left + cell // 2, top + cell // 2), str(number), fill=ink, anchor="mm")
    _draw_legend(pen, last, sum(map(len, rounds)), height + 2 * EDGE, wide)
    return image


def round_colour(number: int, last: int) -> tuple[int, int, int]:
    """The colour of a round on a ramp from dark to light."""
    place = (len(RAMP) - 1) * (number / last if last else 0.0)
    low = min(int(place), len(RAMP) - 2)
    share = place - low
    red, green, blue = (
        round(a + share * (b - a)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True)
    )
    return red, green, blue


def _draw_legend(pen: ImageDraw.ImageDraw, last: int, cells: int, top: int, wide: int) -> None:
    for x in range(EDGE, wide - EDGE):
        share = (x - EDGE) / (wide - 2 * EDGE)
        pen.line([(x, top), (x, top + BAR)], fill=round_colour(round(share * last), last))
    pen.text((EDGE, top + BAR + 3), "round 0", fill="black")
    label = f"{last}, for {cells} codes"
    pen.text((wide - EDGE, top + BAR + 3), label, fill="black", anchor="ra")


def render_frames(
    image: Image.Image, rounds: Sequence[Sequence[int]], last: int
) -> list[Image.Image]:
    """The image after each round 0 .. `last`, open cells in grey; `rounds` (H, W) by cell.

    Cells are cut out of the final image. The image of a partial generation (`Round.partial`) may
    differ next to open cells, because the decoder's receptive field covers neighbours.
    """
    return [_mask_open_cells(image.convert("RGB"), rounds, number) for number in range(last + 1)]


def _mask_open_cells(
    image: Image.Image, rounds: Sequence[Sequence[int]], number: int
) -> Image.Image:
    is_open = Image.new("L", (len(rounds[0]), len(rounds)))
    is_open.putdata([255 * (accepted > number) for row in rounds for accepted in row])
    frame = image.copy()
    frame.paste(GREY, mask=is_open.resize(image.size, Image.Resampling.NEAREST))
    return frame
