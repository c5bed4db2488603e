"""Render rollouts: animation frames, and maps of the source of each action component."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from PIL import Image, ImageDraw

from mmspec.modalities.common.sheets import Panel, sheet
from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.step_stats import DRAFTED, HELD, TARGET, UNVERIFIED
from mmspec.tracing.palette import BLUE, GREY, LEAST_WIDTH, VERMILION, YELLOW

CELL, MARGIN, LINE, LABEL = 10, 8, 14, 48  # pixels
TICK_MS = 20  # of an animation: its resolution, the shortest time that browsers show a frame
COLOURS = {TARGET: VERMILION, DRAFTED: BLUE, UNVERIFIED: YELLOW, HELD: GREY}


def render_frames(
    rollouts: Mapping[str, Rollout], slower: int = 1
) -> tuple[list[Image.Image], list[int]]:
    """Frames of all rollouts side by side on one clock, and the milliseconds until the next one.

    The clock is the policy's latency in real time, or `slower` by a whole factor, which the title
    then names; the environment takes no time. Of steps within a tick the last one is shown.
    """
    clocks = {name: _observation_times(one) for name, one in rollouts.items()}
    ticks = sorted({round(at * slower / TICK_MS) for clock in clocks.values() for at in clock})
    pace = f"{slower} times slower than real time" if slower > 1 else "real time"
    title = f"{next(iter(rollouts.values())).instructions[0]} ({pace})"
    frames = []
    for tick in ticks:
        now = (tick + 0.5) * TICK_MS / slower  # a step that falls into a tick is shown in it
        panels = {
            name: [_panel(one, clocks[name], bisect_right(clocks[name], now) - 1)]
            for name, one in rollouts.items()
        }
        frames.append(sheet(panels, [title]))
    return frames, [TICK_MS * (after - tick) for tick, after in pairwise(ticks)]


def _observation_times(rollout: Rollout) -> list[float]:
    """Milliseconds of policy latency before each observation, the first one at 0."""
    done = [0.0, *accumulate(step.latency_ms for step in rollout.steps)]
    chunk = len(rollout.actions) / len(rollout.steps)
    last = len(rollout.steps)
    return [0.0] + [done[min(int(at / chunk) + 1, last)] for at in range(len(rollout.actions))]


def _panel(rollout: Rollout, clock: Sequence[float], at: int) -> Panel:
    """An observation, captioned with its step and time, and the cost of a step up to there."""
    is_over = at == len(rollout.images) - 1
    end = ("done" if rollout.is_success else "not done") if is_over else ""
    calls = sum(step.target_calls for step in rollout.steps) / len(rollout.steps)
    caption = (f"{clock[at] / 1e3:.2f} s, step {at} {end}", f"{calls:.1f} calls a step")
    return Panel(Image.fromarray(rollout.images[at]), caption)


def draw_acceptance_map(rollouts: Mapping[str, Rollout]) -> Image.Image:
    """Draw a band per rollout: a column per step, a named row per component."""
    longest = max(len(one.steps) for one in rollouts.values())
    heights = {name: CELL * len(one.steps[0].sources) for name, one in rollouts.items()}
    width = max(2 * MARGIN + LABEL + CELL * longest, LEAST_WIDTH)
    height = 2 * (MARGIN + LINE) + sum(one + LINE + MARGIN for one in heights.values())
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
    pen.text((MARGIN + LABEL, top), f"step, 1 to {longest}; a row per component", fill="black")
    return made


def _draw_band(pen: ImageDraw.ImageDraw, rollout: Rollout, top: int) -> None:
    names = rollout.components * (len(rollout.actions) // len(rollout.steps) or 1)  # of a chunk
    for row, name in enumerate(names[: len(rollout.steps[0].sources)]):
        pen.text((MARGIN, top + CELL * row - 1), name, fill="black", font_size=9)
    for column, step in enumerate(rollout.steps):
        for row, source in enumerate(step.sources):
            left, upper = MARGIN + LABEL + CELL * column, top + CELL * row
            pen.rectangle((left, upper, left + CELL - 2, upper + CELL - 2), fill=COLOURS[source])
