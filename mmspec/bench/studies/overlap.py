"""Gain of drafting in parallel with the target: measured on one device, predicted for two.

One device executes an overlapped schedule sequentially. The prediction is the time of the same
rounds with draft model and target in parallel: a deterministic sum of component times, which were
measured separately and without contention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mmspec.accelerated import Accelerated
from mmspec.bench.reporting import Progress, Report, describe_environment, silent
from mmspec.draft import Round
from mmspec.modality import Workload

WINDOWS = (2, 3, 4, 6)
PLAIN, SEQUENTIAL, OVERLAPPED = "plain", "coupled", "pearl"


@dataclass(frozen=True)
class ComponentCosts:
    """Seconds of the components."""

    draft: float  # one drafted token
    step: float  # a target forward over one token
    more: float  # per additional drafted token

    def verify(self, nodes: int) -> float:
        """Seconds of a target forward over one token and `nodes` drafted ones."""
        return self.step + nodes * self.more


def sequential_seconds(rounds: Iterable[Round], costs: ComponentCosts) -> float:
    """Seconds of rounds that draft, then verify, without the prefill."""
    nodes = [max(one.drafted) for one in rounds if one.calls]
    return sum(count * costs.draft + costs.verify(count) for count in nodes)


def overlapped_seconds(
    rounds: Iterable[Round], costs: ComponentCosts, window: int, refill: int = 0
) -> float:
    """Seconds of the rounds of a pipelined drafter, without the prefill.

    During a target forward `window` tokens are drafted, unless the text ends. After a rejection,
    `refill` tokens (0 or `window`) are drafted before the next target forward; a window that was
    ready has one token less. Raises ValueError for other values, which rounds cannot distinguish.
    """
    if refill not in (0, window):
        raise ValueError(f"refill={refill} is neither 0 nor the window of {window}; give one")
    total = 0.0
    for round_ in rounds:
        if round_.calls:
            nodes = max(round_.drafted)
            before = nodes if nodes == refill else 0
            parallel = 0 if all(round_.finished) else window
            total += before * costs.draft + max(costs.verify(nodes), parallel * costs.draft)
    return total


@dataclass(frozen=True)
class OverlapPoint:
    """One window: component times in milliseconds, and the gain of overlapping."""

    window: int
    draft_ms: float
    target_ms: float  # of one token
    verify_ms: float  # of the window and one more
    tokens_per_call: float  # sequential
    tokens_per_call_ahead: float
    predicted: float  # decoding time, sequential over overlapped, on two devices
    measured: float  # the same on this machine
    identical: bool  # all tokens


@dataclass(frozen=True)
class Overlap(Report):
    """The report of `mmspec bench overlap`."""

    model: str
    points: list[OverlapPoint]
    environment: dict[str, Any] = field(default_factory=dict)


def overlap(
    accelerated: Callable[..., Accelerated],
    workload: Workload,
    *,
    model: str = "model",
    windows: Sequence[int] = WINDOWS,
    refills: bool = False,
    repeats: int = 3,
    seed: int = 0,
    progress: Progress = silent,
) -> Overlap:
    """Measure windows; `accelerated(recipe, **parts)` binds recipes to one pair.

    After a rejection the target runs at once, or with `refills` on a whole new window.
    """
    plain = _TimedRun(accelerated(PLAIN), workload.timed, seed)
    plain.repeat()
    points = []
    for at, window in enumerate(windows):
        refill = window if refills else 0
        ways = (
            accelerated(SEQUENTIAL, length=window),
            accelerated(OVERLAPPED, length=window, refill=refill),
        )
        runs = [_TimedRun(fast, workload.timed, seed) for fast in ways]
        for repeat in range(repeats + 1):  # the first warms up
            for run in (plain, *runs) if repeat % 2 else (*reversed(runs), plain):
                run.repeat(is_measured=repeat > 0)
        points.append(_point(window, refill, plain, *runs))
        progress("measure", at + 1, len(windows))
    return Overlap(model, points, describe_environment(workload.device))


class _TimedRun:
    """Decodes all requests with one recipe, several times."""

    def __init__(self, fast: Accelerated, requests: Sequence[Any], seed: int) -> None:
        self.fast, self.requests, self.seed = fast, requests, seed
        self.rounds: list[Round] = []
        self.decode: list[float] = []  # per repetition, seconds without the prefill
        self.parts: dict[str, list[float]] = {"draft": [], "verify": []}

    def repeat(self, is_measured: bool = False) -> None:
        self.rounds = []
        for request in self.requests:
            self.fast.generate(**request, seed=self.seed, on_round=self.rounds.append)
        if is_measured:
            rounds = [one for one in self.rounds if one.index]
            for part, seconds in self.parts.items():
                seconds.append(sum(one.seconds.get(part, 0.0) for one in rounds))
            self.decode.append(sum(sum(one.seconds.values()) for one in rounds))

    @property
    def tokens(self) -> list[tuple[Any, ...]]:
        return [token for one in self.rounds for token in one.tokens]

    @property
    def calls(self) -> int:
        return sum(one.calls for one in self.rounds)

    @property
    def per_call(self) -> float:
        count = sum(len(row) for one in self.rounds if one.calls for row in one.tokens)
        return count / max(self.calls, 1)

    def mean(self, part: str, count: int) -> float:
        return median(self.parts[part]) / max(count, 1)


def _point(
    window: int, refill: int, plain: _TimedRun, waits: _TimedRun, ahead: _TimedRun
) -> OverlapPoint:
    if not waits.calls or not ahead.calls:
        raise ValueError("all answers ended with the prompt's token; allow more --max-new-tokens")
    drafted = sum(max(one.drafted) for one in waits.rounds)
    step, verify = plain.mean("verify", plain.calls), waits.mean("verify", waits.calls)
    costs = ComponentCosts(waits.mean("draft", drafted), step, max(verify - step, 0.0) / window)
    predicted = sequential_seconds(waits.rounds, costs) / overlapped_seconds(
        ahead.rounds, costs, window, refill
    )
    same = _flat(waits) == _flat(ahead) == _flat(plain)
    return OverlapPoint(
        window,
        draft_ms=1e3 * costs.draft,
        target_ms=1e3 * step,
        verify_ms=1e3 * costs.verify(window),
        tokens_per_call=waits.per_call,
        tokens_per_call_ahead=ahead.per_call,
        predicted=predicted,
        measured=median(waits.decode) / median(ahead.decode),
        identical=same,
    )


def _flat(run: _TimedRun) -> list[Any]:
    """Return the tokens of all requests, in order."""
    return [token for row in run.tokens for token in row]
