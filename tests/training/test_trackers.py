"""Trackers log every step once, also of a resumed run; missing packages are one error."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from mmspec.training import trackers
from mmspec.training.trackers import Trackers, check_trackers


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of a TensorBoard folder, by name."""
    module: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(folder))
    found.Reload()
    return {
        name: [(one.step, one.value) for one in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_a_resumed_run_continues_the_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = Trackers.start(("tensorboard",), tmp_path, {}, 0)
    for step in (1, 2, 3):
        first.log({"loss": 10.0 + step}, step)
    first.finish()
    again = Trackers.start(("tensorboard",), tmp_path, {}, 2)  # step 3 was not in a checkpoint
    again.log({"loss": 3.0}, 3)
    again.finish()
    loss = read_scalars(tmp_path / "tensorboard")["loss"]
    assert loss == [(1, 11.0), (2, 12.0), (3, 3.0)]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("accelerate", r"--track wandb needs the package accelerate; install mmspec\[train\]"),
        ("wandb", r"--track wandb needs the package wandb; install wandb, or drop --track"),
    ],
)
def test_a_missing_package_is_named(
    missing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> object:
        return None if name == missing else importlib.util

    monkeypatch.setattr(trackers, "find_spec", find_spec)
    with pytest.raises(ValueError, match=message):
        check_trackers(("wandb",))


def test_a_tracker_that_cannot_start_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(ValueError, match="--track tensorboard cannot start"):
        Trackers.start(("tensorboard",), tmp_path, {}, 0)


def test_wandb_gets_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = Trackers.start(("wandb",), tmp_path / "logs", {"steps": "5"}, 0)
    made.log({"loss": 1.0}, 1)
    run = made.trackers[0].tracker
    assert (run.config["steps"], run.group) == ("5", tmp_path.name)
    made.finish()
    assert list((tmp_path / "logs").rglob("*.wandb"))
    assert wandb.run is None
