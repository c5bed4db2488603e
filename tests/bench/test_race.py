"""Everybody answers everything, in turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mmspec.bench.race import Ratio, race
from mmspec.modality import RunResult

REQUESTS = [{"number": 0}, {"number": 1}]


class Scribe:
    """Writes down who was asked for what."""

    def __init__(self, name: str, log: list[tuple[str, int, int]], fails: bool = False) -> None:
        self.name, self.log, self.fails = name, log, fails

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult:
        if self.fails and request["number"]:
            raise ValueError("no ink")
        self.log.append((self.name, request["number"], seed))
        return RunResult([[request["number"]] * 4], 4, 1.0)

    def run_first_token(self, request: Mapping[str, Any], seed: int) -> RunResult | None:
        return None if self.name == "b" else RunResult([[request["number"]]], 1, 0.0)


def test_who_starts_changes_and_seeds_belong_to_requests() -> None:
    log: list[tuple[str, int, int]] = []
    held = race({name: Scribe(name, log) for name in "ab"}, REQUESTS, 2, seed=7)
    warm, rest = log[:2], log[2:]
    assert warm == [("a", 0, 7), ("b", 0, 7)]
    assert [name for name, _, _ in rest] == ["a", "b", "b", "a", "b", "a", "a", "b"]
    assert {(number, seed) for _, number, seed in rest} == {(0, 7), (1, 8)}
    assert [answer.values for answer in held.laps["b"].answers] == [[[0] * 4], [[1] * 4]]
    assert len(held.laps["a"].whole) == 2
    assert not held.failed


def test_first_tokens_are_an_ability() -> None:
    held = race({name: Scribe(name, []) for name in "ab"}, REQUESTS, 2)
    with_first, without = held.laps["a"], held.laps["b"]
    assert (with_first.begun, with_first.count) == (2, 8)
    later, whole = with_first.each_later(), with_first.whole
    assert later == [
        pytest.approx(max(lap - first, 1e-9) / 6)
        for lap, first in zip(whole, with_first.first, strict=True)
    ]
    assert (without.first, without.each_later()) == ([], [])
    assert Ratio.of(later, without.each_later()) is None


def test_guests_may_fail_at_any_time_and_others_not() -> None:
    entered = {"a": Scribe("a", []), "guest": Scribe("guest", [], fails=True)}
    held = race(entered, REQUESTS, 2, may_fail={"guest"})
    assert (list(held.laps), held.failed) == (["a"], {"guest": "ValueError: no ink"})
    assert len(held.laps["a"].answers) == 2
    with pytest.raises(ValueError, match="no ink"):
        race(entered, REQUESTS, 1)


def test_ratios_are_medians_with_extremes() -> None:
    found = Ratio.of([2.0, 4.0, 9.0], [1.0, 1.0, 1.0])
    assert found is not None
    assert (found.median, found.spread) == (4.0, [2.0, 9.0])
