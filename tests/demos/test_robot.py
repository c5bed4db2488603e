"""`demos/robot.py` on a small policy: an animation, a plot and a table."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.modalities.vla.policies import policy, processor

DEMO = Path(__file__).parents[2] / "demos" / "robot.py"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo")
    policy().save_pretrained(folder / "policy")
    processor().save_pretrained(folder / "policy")
    named = {"model": str(folder / "policy"), "drafter": None, "world": "table"}
    how = {"instruction": None, "deadline_ms": None, "overrides": None, "robots": 1}
    return {**named, **how, "recipe": ["hold-last", "hold-last-tolerance"], "steps": 3, "seed": 4}


@pytest.mark.exhaustive
def test_episodes_at_once_are_those_one_by_one(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calls per action of every way; nothing is written, and the rest is not of the clock."""
    main, calls = runpy.run_path(str(DEMO))["main"], []
    for robots, column in ((1, 3), (3, -1)):
        main(**{**asked, "robots": robots, "overrides": ["length=6"]}, episodes=3, out=tmp_path)
        lines = [line for line in capsys.readouterr().out.splitlines() if " of 3 " in line]
        calls.append([line.split()[column + 2 if column > 0 else column] for line in lines])
    assert len(calls[0]) == 3
    assert calls[0] == calls[1]


def test_the_demo_acts(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(DEMO))["main"](**asked, episodes=2, out=tmp_path)
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if " of 2 " in line}
    assert list(rows) == ["plain", "hold-last", "hold-last-tolerance"]
    assert [" exact" in row for row in rows.values()] == [True, True, False]
    assert all(" yes " in row for row in list(rows.values())[:2])
    moving: Any = Image.open(tmp_path / "robot.gif")
    assert 2 <= moving.n_frames <= 1 + 3 * 3  # robots that act at the same time share frames
    assert moving.width > 400
    assert Image.open(tmp_path / "robot.png").width > 400
