"""`demos/recommendation.py`: lists and sessions are the target's own, trained or not."""

from __future__ import annotations

import runpy
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from mmspec.modalities.common import beam_generation
from tests.test_beams import DraftedOnly

DEMO = Path(__file__).parents[2] / "demos" / "recommendation.py"


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    return runpy.run_path(str(DEMO))


@pytest.fixture(scope="module")
def shop(demo: dict[str, Any]) -> Any:
    return demo["Shop"].of(0)


@pytest.mark.exhaustive
def test_lists_are_those_of_generate(
    demo: dict[str, Any], shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, other = demo["make_model"](2, 32, 0), demo["make_model"](1, 32, 1)
    requests = shop.histories([0, 3], 3, 0)
    assert requests.shape == (2, 1 + 3 * demo["LEVELS"])
    plain, fast, lists = demo["compare_lists"](target, deepcopy(target), shop, requests, 3)
    assert plain == 2 * demo["LEVELS"]
    assert fast <= plain  # untrained, it drafts ids of no item too
    known = {tuple(item) for item in shop.codes.tolist()}
    assert {tuple(item) for item in lists.flatten(0, 1).tolist()} <= known
    assert demo["compare_lists"](target, other, shop, requests, 3)[1] <= plain
    monkeypatch.setattr(beam_generation, "StrictBeams", DraftedOnly)
    with pytest.raises(ValueError, match="not that of generate"):
        demo["compare_lists"](target, other, shop, requests, 3)


@pytest.mark.exhaustive
def test_sessions_are_those_of_the_target_unless_relaxed(demo: dict[str, Any], shop: Any) -> None:
    target = demo["train"](demo["make_model"](1, 32, 0), shop, 30, 0, batch=8)
    rows = demo["compare_sessions"](target, shop, shop.histories([1, 2], 3, 0), [1, 2], 1)
    exact, relaxed = rows[:-1], rows[-1]
    assert len(exact) == 3
    assert all(row.same == row.tokens == 2 * 16 for row in exact)
    assert all(0 < row.calls <= row.tokens for row in rows)
    assert relaxed.same < relaxed.tokens


@pytest.mark.slow
def test_a_trained_pair_saves_calls(
    demo: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    demo["main"](steps=150, users=4, seed=0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    counts = [(int(line[1]), int(line[2])) for line in lines if line[:1] and line[0].isdigit()]
    assert len(counts) == len(demo["LISTS"])
    assert sum(fast for _, fast in counts) < sum(plain for plain, _ in counts)
