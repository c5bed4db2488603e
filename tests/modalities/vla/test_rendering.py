"""Animations run on the policy's clock; maps name their rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mmspec.modalities.vla import rendering
from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.step_stats import DRAFTED, TARGET, ActionStep

NAMES = ("x", "y", "gripper")


def rollout(latency_ms: float, steps: int, chunk: int = 1) -> Rollout:
    sources = (TARGET, DRAFTED, TARGET) * chunk
    each = ActionStep(0, (), sources, 1, 2, (), None, 0, 0, latency_ms, False)
    images = [np.full((8, 8, 3), 20 * at, np.uint8) for at in range(steps * chunk + 1)]
    actions = np.zeros((steps * chunk, 3))
    return Rollout(images, actions, [], [], ["go"], True, (each,) * steps, components=NAMES)


@pytest.mark.parametrize(("scale", "slower"), [(400.0, 1), (100.0, 4)])
def test_a_faster_recipe_ends_earlier(
    scale: float, slower: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as fast at the same number of steps: done in half of the animation."""
    shown: list[tuple[dict[str, int], str]] = []

    def record(columns: object, titles: list[str]) -> object:
        assert isinstance(columns, dict)
        brightness = {
            name: panel.picture.getpixel((0, 0))[0] // 20 for name, (panel,) in columns.items()
        }
        shown.append((brightness, titles[0]))
        return object()

    monkeypatch.setattr(rendering, "sheet", record)
    rollouts = {"plain": rollout(scale, 10), "fast": rollout(scale / 2, 10)}
    frames, durations = rendering.render_frames(rollouts, slower)
    assert len(frames) == len(durations) + 1 == len(shown)
    starts = np.cumsum([0, *durations])
    for start, (steps, title) in zip(starts, shown, strict=True):
        now = start / slower
        assert steps == {"plain": int(now / scale), "fast": min(int(2 * now / scale), 10)}
        assert ("4 times slower" in title) == (slower == 4)
    assert starts[-1] == 10 * scale * slower


def test_actions_of_a_chunk_follow_its_request() -> None:
    frames, durations = rendering.render_frames({"plain": rollout(2000.0, 2, chunk=3)})
    assert len(frames) == 3
    assert durations == [2000, 2000]


def test_the_rows_of_a_map_are_named() -> None:
    one = rollout(10.0, 4)
    labelled = np.asarray(rendering.draw_acceptance_map({"plain": one}))
    bare = np.asarray(rendering.draw_acceptance_map({"plain": replace(one, components=())}))
    rows, columns = (labelled != bare).any(-1).nonzero()
    assert len(rows)
    assert columns.max() < rendering.MARGIN + rendering.LABEL  # beside the cells
    assert rows.max() - rows.min() > 2 * rendering.CELL  # each of the three
