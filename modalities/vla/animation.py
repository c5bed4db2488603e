"""Episodes as pictures that move: what the camera saw, step by step, side by side."""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image

from mmspec.modalities.common.sheets import Panel, sheet
from mmspec.modalities.vla.rollout import Rollout


def frames(rollouts: Mapping[str, Rollout]) -> list[Image.Image]:
    """One frame per step of the longest; who has ended stands still."""
    longest = max(len(one.images) for one in rollouts.values())
    titles = [next(iter(rollouts.values())).instructions[0]]
    columns = [{name: [_panel(one, at)] for name, one in rollouts.items()} for at in range(longest)]
    return [sheet(column, titles) for column in columns]


def _panel(rollout: Rollout, at: int) -> Panel:
    """Below the picture: how far it is, and what the last answer took."""
    at = min(at, len(rollout.images) - 1)
    is_over = at == len(rollout.images) - 1
    chunk = len(rollout.actions) / len(rollout.steps)
    step = rollout.steps[min(int(max(at - 1, 0) / chunk), len(rollout.steps) - 1)]
    end = ("done" if rollout.is_success else "not done") if is_over else ""
    words = (f"step {at} {end}", f"{step.target_calls} calls, {step.latency_ms:.0f} ms")
    return Panel(Image.fromarray(rollout.images[at]), words)
