"""`demos/robot.py` on a small policy: an animation, a plot and a table."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.modalities.vla.policies import policy, processor

DEMO = Path(__file__).parents[1] / "demos" / "robot.py"


def test_the_demo_acts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy().save_pretrained(tmp_path / "policy")
    processor().save_pretrained(tmp_path / "policy")
    demo = runpy.run_path(str(DEMO))
    demo["main"](
        model=str(tmp_path / "policy"),
        drafter=None,
        recipe=["hold-last", "hold-last-tolerance"],
        world="table",
        instruction=None,
        episodes=2,
        steps=3,
        deadline_ms=None,
        seed=4,
        out=tmp_path,
    )
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if " of 2 " in line}
    assert list(rows) == ["plain", "hold-last", "hold-last-tolerance"]
    assert [" exact" in row for row in rows.values()] == [True, True, False]
    assert all(" yes " in row for row in list(rows.values())[:2])
    moving: Any = Image.open(tmp_path / "robot.gif")
    assert (moving.n_frames, moving.width > 400) == (4, True)
    assert Image.open(tmp_path / "robot.png").width > 400
