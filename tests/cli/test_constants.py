"""`mmspec train constants`: a file that the recipes load, from episodes of the bundled policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mmspec
from mmspec.codes.action_constants import ActionConstants
from mmspec.codes.trajectories import Trajectories
from tests.cli.running import fail, run

ASKED = ["train", "constants", "--model", "zoo:vla"]


def test_what_cannot_be_fitted_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    for more, words in (
        (["--recipe", "spec-vla", "--out", str(tmp_path)], "'spec-vla' has no constants to fit"),
        (["--recipe", "kerv", "--out", str(file)], "is a file; give a folder"),
    ):
        assert words in fail(capsys, *ASKED, *more)[1]


@pytest.mark.exhaustive
def test_constants_are_fitted_and_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "fitted"
    sizes = ["--episodes", "3", "--steps", "14", "--world", "moving-goals", "--out", str(out)]
    document = run(capsys, *ASKED, *sizes, "--recipe", "heisd", "--recipe", "kerv")
    found = ActionConstants.load(out)
    assert document["constants"] == vars(found)
    assert document["figures"]["forecast error, bins"] <= document["figures"]["of the last action"]
    assert Trajectories.load(out).count == 3 * 14
    own: dict[str, dict[str, Any]] = {"kerv": {}, "heisd": {"store": out, "window": 3}}
    for name, more in own.items():
        fast: Any = mmspec.accelerate("zoo:vla", name, constants=out, length=6, **more)
        assert len(fast.rollout("moving-goals", seed=1, steps=3).actions) == 3
    assert fast.session.bound.gate.theta == found.theta
