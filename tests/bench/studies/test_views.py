"""What a draft reads of the target's memory does not grow with the clip."""

from __future__ import annotations

from typing import Any

import pytest

from mmspec.bench.studies.views import views
from tests.cli.running import run


def test_what_a_view_holds_does_not_grow() -> None:
    found = views("probe", visual=(32, 256), tokens=(8, 16), length=2, rounds=3)
    held = {(one.visual, one.tokens): one.memory_mb for one in found.points}
    assert held[32, 8] == held[256, 8] < held[256, 16] == held[32, 16]
    assert held[32, None] < held[256, None]
    assert held[256, None] > 3 * held[256, 8]
    assert all(min(one.draft_ms, one.verify_ms) > 0 for one in found.points)


def test_it_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("bench", "views", "--shape", "probe", "--visual", "16", "--tokens", "4")
    found = run(capsys, *asked, "--rounds", "1", "--length", "2")
    assert [(one["visual"], one["tokens"]) for one in found["points"]] == [(16, 4), (16, None)]


@pytest.mark.parametrize("device", ["tpu9", "cuda:99", "mps", "meta"])
def test_devices_are_looked_for(device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}' is not available; give one"):
        views("probe", device=device)


@pytest.mark.parametrize("name", ["length", "rounds", "visual", "tokens"])
def test_counts_have_limits(name: str) -> None:
    wrong: Any = {name: [-1] if name in ("visual", "tokens") else 10**12}
    with pytest.raises(ValueError, match=f"{name}=.* must be a whole number of at least"):
        views("probe", **wrong)


@pytest.mark.slow
def test_time_grows_with_what_is_read() -> None:
    """Eight times the context: a sparse draft costs what it did, a dense one several times that."""
    found = views("tiny", visual=(1024, 8192), tokens=(64,), rounds=30)
    spent = {(one.visual, one.tokens): one.draft_ms for one in found.points}
    assert spent[8192, 64] < 1.5 * spent[1024, 64]
    assert spent[8192, None] > 1.5 * spent[8192, 64]
