"""Times taken fairly: everybody answers the same requests, in turns, several times over."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from mmspec.bench.environment import seconds
from mmspec.bench.progress import Progress, silent
from mmspec.modality import Runner, RunResult

FAILURES = (ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError)


@dataclass
class Laps:
    """One contestant's seconds of each repeat, over all requests.

    `first` are those of answers stopped after one token; none where there is no such thing.
    """

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    begun: int = 0  # what the answers behind `first` count together
    answers: list[RunResult] = field(default_factory=list)  # of the last repeat, per request

    @property
    def count(self) -> int:
        return sum(answer.count for answer in self.answers)

    def each(self) -> list[float]:
        """Seconds per token (code, picture), of each repeat."""
        return [lap / max(self.count, 1) for lap in self.whole]

    def each_later(self) -> list[float]:
        """Seconds per token but the first of each row, without the time of a one-token call."""
        pairs = zip(self.whole, self.first, strict=True) if self.first else ()
        return [max(lap - first, 1e-9) / max(self.count - self.begun, 1) for lap, first in pairs]


@dataclass(frozen=True)
class Race:
    """Everybody's laps, and why some could not finish."""

    laps: dict[str, Laps]
    failed: dict[str, str]


@dataclass(frozen=True)
class Ratio:
    """A ratio measured in every repeat: its median and its extremes."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio | None:
        """None where nothing was measured on either side."""
        values = [a / b for a, b in zip(above, below, strict=True)] if above and below else []
        return cls(median(values), min(values), max(values)) if values else None

    @property
    def spread(self) -> list[float]:
        return [self.least, self.most]


def race(
    contestants: Mapping[str, Runner],
    requests: Sequence[Mapping[str, Any]],
    repeats: int = 5,
    *,
    seed: int = 0,
    device: Any = "cpu",
    may_fail: Collection[str] = (),
    progress: Progress = silent,
) -> Race:
    """Let everybody answer everything, `repeats` times after a warm-up; who starts changes.

    Request i has seed + i. Contestants in `may_fail` leave the race with their first error; errors
    of others are raised.
    """
    running, failed = list(contestants), dict[str, str]()
    laps = {name: Laps() for name in contestants}

    def attempt(name: str, index: int, lap: Laps) -> None:
        try:
            _answer(contestants[name], requests[index], seed + index, torch.device(device), lap)
        except FAILURES as error:
            if name not in may_fail:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
            running.remove(name)
            del laps[name]

    for name in contestants:
        attempt(name, 0, Laps([0.0], [0.0]))
    for repeat in range(repeats):
        for lap in laps.values():
            lap.whole.append(0.0)
            lap.first.append(0.0)
            lap.begun, lap.answers = 0, []
        for index in range(len(requests)):
            turn = (repeat + index) % len(running)
            for name in [*running[turn:], *running[:turn]]:
                attempt(name, index, laps[name])
            progress("measure", repeat * len(requests) + index + 1, repeats * len(requests))
    for lap in laps.values():
        lap.first = lap.first if lap.begun else []
    return Race(laps, failed)


def _answer(
    contestant: Runner, request: Mapping[str, Any], seed: int, device: torch.device, lap: Laps
) -> None:
    """Note one request: the first token alone where that can be asked for, and all of it."""
    start = seconds(device)
    first = contestant.run_first_token(request, seed)
    middle = seconds(device)
    answer = contestant.run(request, seed)
    spent = seconds(device) - middle
    lap.whole[-1] += spent if answer.seconds is None else answer.seconds
    lap.first[-1] += middle - start
    lap.begun += 0 if first is None else first.count
    lap.answers.append(answer)


def timed(
    contestant: Runner, request: Mapping[str, Any], seed: int, device: Any
) -> tuple[float, RunResult]:
    """One answer and the seconds it took."""
    start = seconds(torch.device(device))
    answer = contestant.run(request, seed)
    return seconds(torch.device(device)) - start, answer
