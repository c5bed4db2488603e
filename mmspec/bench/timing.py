"""Interleaved timing: all runners decode the same requests in turns, over several repeats."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from mmspec.bench.reporting import Progress, read_clock, silent
from mmspec.modality import Runner, RunResult
from mmspec.targets.call_stack import reserve_stack

RUN_ERRORS = (ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError)


@dataclass
class Timings:
    """Seconds of one runner over all requests, one entry per repeat.

    `first_token_seconds` are of runs that stop after one token; empty for runners without them.
    """

    run_seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    num_first_tokens: int = 0  # over all requests
    results: list[RunResult] = field(default_factory=list)  # of the last repeat, per request

    @property
    def count(self) -> int:
        return sum(result.count for result in self.results)

    def seconds_per_token(self) -> list[float]:
        """Seconds per token (code, image) of each repeat."""
        return [seconds / max(self.count, 1) for seconds in self.run_seconds]

    def decode_seconds_per_token(self) -> list[float]:
        """Seconds per token after the first of each row, less the time of a one-token run.

        Empty where decoding takes no time that can be told from that run's: without further tokens
        or target calls, or with a repeat that took less.
        """
        count = self.count - self.num_first_tokens
        if not self.first_token_seconds or count < 1 or not any(one.calls for one in self.results):
            return []
        pairs = zip(self.run_seconds, self.first_token_seconds, strict=True)
        spent = [seconds - first for seconds, first in pairs]
        return [seconds / count for seconds in spent] if min(spent) > 0 else []


@dataclass(frozen=True)
class TimingResult:
    """Timings of all runners that finished, and the errors of the others."""

    timings: dict[str, Timings]
    failures: dict[str, str]


@dataclass(frozen=True)
class Ratio:
    """A ratio measured in every repeat: median, minimum and maximum."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio | None:
        """None where either side has no measurements, or a clock that did not move."""
        if not above or not below or min(below) <= 0:
            return None
        values = [a / b for a, b in zip(above, below, strict=True)]
        return cls(median(values), min(values), max(values))

    @property
    def spread(self) -> list[float]:
        return [self.minimum, self.maximum]


def time_runners(
    runners: Mapping[str, Runner],
    requests: Sequence[Mapping[str, Any]],
    repeats: int = 5,
    *,
    seed: int = 0,
    device: Any = "cpu",
    may_fail: Collection[str] = (),
    progress: Progress = silent,
) -> TimingResult:
    """Run all requests with all runners, `repeats` times after a warm-up, in rotating order.

    Request i has seed + i. Runners in `may_fail` are dropped at their first error; errors of others
    are raised.
    """
    running, failures = list(runners), dict[str, str]()
    timings = {name: Timings() for name in runners}

    def attempt(name: str, index: int, into: Timings) -> None:
        try:
            _time_request(runners[name], requests[index], seed + index, torch.device(device), into)
        except RUN_ERRORS as error:
            if name not in may_fail:
                raise
            failures[name] = f"{type(error).__name__}: {error}"
            running.remove(name)
            del timings[name]

    for name in runners:
        attempt(name, 0, Timings([0.0], [0.0]))
    for repeat in range(repeats):
        for one in timings.values():
            one.run_seconds.append(0.0)
            one.first_token_seconds.append(0.0)
            one.num_first_tokens, one.results = 0, []
        for index in range(len(requests)):
            turn = (repeat + index) % len(running)
            for name in [*running[turn:], *running[:turn]]:
                attempt(name, index, timings[name])
            progress("measure", repeat * len(requests) + index + 1, repeats * len(requests))
    for one in timings.values():
        one.first_token_seconds = one.first_token_seconds if one.num_first_tokens else []
    return TimingResult(timings, failures)


@reserve_stack  # of all runners alike
def _time_request(
    runner: Runner, request: Mapping[str, Any], seed: int, device: torch.device, timings: Timings
) -> None:
    """Add one request to the last repeat: its first token, where supported, and the whole run."""
    start = read_clock(device)
    first = runner.run_first_token(request, seed)
    middle = read_clock(device)
    result = runner.run(request, seed)
    spent = read_clock(device) - middle
    timings.run_seconds[-1] += spent if result.seconds is None else result.seconds
    timings.first_token_seconds[-1] += middle - start
    timings.num_first_tokens += 0 if first is None else first.count
    timings.results.append(result)


def time_run(
    runner: Runner, request: Mapping[str, Any], seed: int, device: Any
) -> tuple[float, RunResult]:
    """Run one request; return its seconds and its result."""
    start = read_clock(torch.device(device))
    result = runner.run(request, seed)
    return read_clock(torch.device(device)) - start, result
