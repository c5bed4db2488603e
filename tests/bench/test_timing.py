"""All runners decode the same requests, in turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mmspec.bench.timing import Ratio, Timings, time_runners
from mmspec.modality import RunResult

REQUESTS = [{"number": 0}, {"number": 1}]


class LoggingRunner:
    """Logs every run."""

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
    timed = time_runners({name: LoggingRunner(name, log) for name in "ab"}, REQUESTS, 2, seed=7)
    warm, rest = log[:2], log[2:]
    assert warm == [("a", 0, 7), ("b", 0, 7)]
    assert [name for name, _, _ in rest] == ["a", "b", "b", "a", "b", "a", "a", "b"]
    assert {(number, seed) for _, number, seed in rest} == {(0, 7), (1, 8)}
    assert [result.values for result in timed.timings["b"].results] == [[[0] * 4], [[1] * 4]]
    assert len(timed.timings["a"].run_seconds) == 2
    assert not timed.failures


def test_first_tokens_are_optional() -> None:
    timed = time_runners({name: LoggingRunner(name, []) for name in "ab"}, REQUESTS, 2)
    with_first, without = timed.timings["a"], timed.timings["b"]
    assert (with_first.num_first_tokens, with_first.count) == (2, 8)
    assert (without.first_token_seconds, without.decode_seconds_per_token()) == ([], [])
    with_first.run_seconds, with_first.first_token_seconds = [7.0, 8.0], [1.0, 5.0]
    assert with_first.decode_seconds_per_token() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("first", "count", "calls"),
    [([2.0, 1.0], 4, 3), ([2.5, 1.0], 4, 3), ([1.0, 1.0], 1, 3), ([1.0, 1.0], 4, 0)],
    ids=["as long", "longer", "one token", "no call after the prompt's"],
)
def test_decoding_that_takes_no_time_has_no_speed(
    first: list[float], count: int, calls: int
) -> None:
    timed = Timings([2.0, 2.0], first, 1, [RunResult(None, count, calls)])
    assert timed.decode_seconds_per_token() == []
    assert Ratio.of([1.0], timed.decode_seconds_per_token()) is None
    assert Ratio.of([1.0, 1.0], [1.0, 0.0]) is None


def test_only_runners_in_may_fail_may_fail() -> None:
    runners = {"a": LoggingRunner("a", []), "guest": LoggingRunner("guest", [], fails=True)}
    timed = time_runners(runners, REQUESTS, 2, may_fail={"guest"})
    assert (list(timed.timings), timed.failures) == (["a"], {"guest": "ValueError: no ink"})
    assert len(timed.timings["a"].results) == 2
    with pytest.raises(ValueError, match="no ink"):
        time_runners(runners, REQUESTS, 1)


def test_ratios_are_medians_with_extremes() -> None:
    found = Ratio.of([2.0, 4.0, 9.0], [1.0, 1.0, 1.0])
    assert found is not None
    assert (found.median, found.spread) == (4.0, [2.0, 9.0])
