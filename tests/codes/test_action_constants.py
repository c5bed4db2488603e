"""Constants of actions: saved, loaded, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmspec.codes.action_constants import FILE, ActionConstants


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    one = ActionConstants(0.3, "random_walk", 2.0, 1.0, theta=0.9)
    file = one.save(tmp_path / "new", world="table")
    assert json.loads(file.read_text())["world"] == "table"
    assert ActionConstants.load(tmp_path / "new") == ActionConstants.load(file) == one


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"constants": {"mass": 1}}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=r"holds no constants of actions .*train constants"):
        ActionConstants.load(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"motion": "jerk"}, "motion='jerk' is not known; choose constant_velocity or random_walk"),
        ({"reference": 0.0}, "reference=0.0; give a value above 0"),
        ({"process": -1.0}, "process=-1.0; give a value above 0"),
        ({"delta": -1.0}, "delta=-1.0 must be a number of at least 0"),
    ],
)
def test_bad_constants_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActionConstants(**given)
