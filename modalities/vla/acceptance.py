"""A map of an episode: where every component of every action came from."""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image, ImageDraw

from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.step_stats import DRAFTED, HELD, TARGET, UNVERIFIED

CELL, MARGIN, LINE = 10, 8, 14  # pixels
COLOURS = {TARGET: "#4269d0", DRAFTED: "#3ca951", UNVERIFIED: "#efb118", HELD: "#9498a0"}


def acceptance_map(rollouts: Mapping[str, Rollout]) -> Image.Image:
    """A band per rollout: a column per step, a cell per component, the first one on top."""
    longest = max(len(one.steps) for one in rollouts.values())
    heights = {name: CELL * len(one.steps[0].sources) for name, one in rollouts.items()}
    width = 2 * MARGIN + max(CELL * longest, 100 * len(COLOURS))
    height = 2 * MARGIN + LINE + sum(one + LINE + MARGIN for one in heights.values())
    made = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(made)
    for place, (word, colour) in enumerate(COLOURS.items()):
        left = MARGIN + 100 * place
        pen.rectangle((left, MARGIN, left + CELL, MARGIN + CELL), fill=colour)
        pen.text((left + CELL + 4, MARGIN - 1), word, fill="black")
    top = 2 * MARGIN + LINE
    for name, one in rollouts.items():
        end = "done" if one.is_success else "not done"
        pen.text((MARGIN, top), f"{name}: {len(one.steps)} steps, {end}", fill="black")
        _band(pen, one, top + LINE)
        top += heights[name] + LINE + MARGIN
    return made


def _band(pen: ImageDraw.ImageDraw, rollout: Rollout, top: int) -> None:
    for column, step in enumerate(rollout.steps):
        for row, source in enumerate(step.sources):
            left, upper = MARGIN + CELL * column, top + CELL * row
            pen.rectangle((left, upper, left + CELL - 2, upper + CELL - 2), fill=COLOURS[source])
