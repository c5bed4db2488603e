"""Render rollouts: animation frames, and maps of the source of each action component."""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image, ImageDraw

from mmspec.modalities.common.sheets import Panel, sheet
from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.step_stats import DRAFTED, HELD, TARGET, UNVERIFIED

CELL, MARGIN, LINE = 10, 8, 14  # pixels
COLOURS = {TARGET: "#4269d0", DRAFTED: "#3ca951", UNVERIFIED: "#efb118", HELD: "#9498a0"}


def render_frames(rollouts: Mapping[str, Rollout]) -> list[Image.Image]:
    """One frame per step of the longest rollout, side by side; ended ones repeat their last."""
    longest = max(len(one.images) for one in rollouts.values())
    titles = [next(iter(rollouts.values())).instructions[0]]
    columns = [{name: [_panel(one, at)] for name, one in rollouts.items()} for at in range(longest)]
    return [sheet(column, titles) for column in columns]


def _panel(rollout: Rollout, at: int) -> Panel:
    """An observation, captioned with the step and the cost of the last request."""
    at = min(at, len(rollout.images) - 1)
    is_over = at == len(rollout.images) - 1
    chunk = len(rollout.actions) / len(rollout.steps)
    step = rollout.steps[min(int(max(at - 1, 0) / chunk), len(rollout.steps) - 1)]
    end = ("done" if rollout.is_success else "not done") if is_over else ""
    caption = (f"step {at} {end}", f"{step.target_calls} calls, {step.latency_ms:.0f} ms")
    return Panel(Image.fromarray(rollout.images[at]), caption)


def draw_acceptance_map(rollouts: Mapping[str, Rollout]) -> Image.Image:
    """Draw a band per rollout: a column per step, a cell per component, the first on top."""
    longest = max(len(one.steps) for one in rollouts.values())
    heights = {name: CELL * len(one.steps[0].sources) for name, one in rollouts.items()}
    width = 2 * MARGIN + max(CELL * longest, 100 * len(COLOURS))
    height = 2 * MARGIN + LINE + sum(one + LINE + MARGIN for one in heights.values())
    made = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(made)
    for index, (label, colour) in enumerate(COLOURS.items()):
        left = MARGIN + 100 * index
        pen.rectangle((left, MARGIN, left + CELL, MARGIN + CELL), fill=colour)
        pen.text((left + CELL + 4, MARGIN - 1), label, fill="black")
    top = 2 * MARGIN + LINE
    for name, one in rollouts.items():
        end = "done" if one.is_success else "not done"
        pen.text((MARGIN, top), f"{name}: {len(one.steps)} steps, {end}", fill="black")
        _draw_band(pen, one, top + LINE)
        top += heights[name] + LINE + MARGIN
    return made


def _draw_band(pen: ImageDraw.ImageDraw, rollout: Rollout, top: int) -> None:
    for column, step in enumerate(rollout.steps):
        for row, source in enumerate(step.sources):
            left, upper = MARGIN + CELL * column, top + CELL * row
            pen.rectangle((left, upper, left + CELL - 2, upper + CELL - 2), fill=COLOURS[source])
