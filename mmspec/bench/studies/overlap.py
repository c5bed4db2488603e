"""What drafting ahead of the target gains: measured here, and by a clock where two devices run.

One device does the work of an overlapped schedule in some order. The clock says how long the very
rounds would take where draft model and target run side by side: it adds up component times, each
measured by itself, and knows of no contention. It is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mmspec.api import Accelerated
from mmspec.bench.environment import environment
from mmspec.bench.progress import Progress, silent
from mmspec.bench.report import Report
from mmspec.draft import Round
from mmspec.modality import Workload

WINDOWS = (2, 3, 4, 6)
PLAIN, SEQUENTIAL, OVERLAPPED = "plain", "coupled", "pearl"


@dataclass(frozen=True)
class ComponentCosts:
    """Seconds of the components."""

    draft: float  # one drafted token
    step: float  # a target forward over the waiting token alone
    more: float  # what each drafted token adds to that

    def verify(self, nodes: int) -> float:
        """A target forward over the waiting token and `nodes` drafted ones."""
        return self.step + nodes * self.more


def sequential(rounds: Iterable[Round], costs: ComponentCosts) -> float:
    """Seconds of rounds that draft first and verify then, the prefill aside."""
    nodes = [max(kept.drafted) for kept in rounds if kept.calls]
    return sum(count * costs.draft + costs.verify(count) for count in nodes)


def overlapped(
    rounds: Iterable[Round], costs: ComponentCosts, window: int, refill: int = 0
) -> float:
    """Seconds of the rounds of `mmspec.drafters.neural.ahead.DraftsAhead`, the prefill aside.

    Beside a target forward `window` tokens are drafted, unless the text ends there. Behind a
    rejection `refill` tokens, 0 or the `window`, are drafted before the target is asked; a window
    that was ready has one less than it. Raises ValueError for other numbers, which the rounds do
    not tell apart.
    """
    if refill not in (0, window):
        raise ValueError(f"refill={refill} is neither 0 nor the window of {window}; give one")
    total = 0.0
    for kept in rounds:
        if kept.calls:
            nodes = max(kept.drafted)
            waited = nodes if nodes == refill else 0
            beside = 0 if all(kept.finished) else window
            total += waited * costs.draft + max(costs.verify(nodes), beside * costs.draft)
    return total


@dataclass(frozen=True)
class OverlapPoint:
    """One window: component times in milliseconds, and what overlapping gains over waiting."""

    window: int
    draft_ms: float
    target_ms: float  # of one token
    verify_ms: float  # of the window and one more
    tokens_per_call: float  # sequential
    tokens_per_call_ahead: float
    predicted: float  # seconds of decoding, sequential over overlapped, by the clock
    measured: float  # the same on this machine
    identical: bool  # all tokens


@dataclass(frozen=True)
class Overlap(Report):
    """What `mmspec bench overlap` reports."""

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

    Behind a rejection the target is asked at once, or with `refills` about a whole window.
    """
    plain = _TimedRun(accelerated(PLAIN), workload.timed, seed)
    plain.again()
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
                run.again(keeps=repeat > 0)
        points.append(_point(window, refill, plain, *runs))
        progress("measure", at + 1, len(windows))
    return Overlap(model, points, environment(workload.device))


class _TimedRun:
    """One way to decode all requests, several times."""

    def __init__(self, fast: Accelerated, requests: Sequence[Any], seed: int) -> None:
        self.fast, self.requests, self.seed = fast, requests, seed
        self.rounds: list[Round] = []
        self.decode: list[float] = []  # per repetition, seconds without the prefill
        self.parts: dict[str, list[float]] = {"draft": [], "verify": []}

    def again(self, keeps: bool = False) -> None:
        self.rounds = []
        for request in self.requests:
            self.fast.generate(**request, seed=self.seed, on_round=self.rounds.append)
        if keeps:
            rounds = [kept for kept in self.rounds if kept.index]
            for part, seconds in self.parts.items():
                seconds.append(sum(kept.seconds.get(part, 0.0) for kept in rounds))
            self.decode.append(sum(sum(kept.seconds.values()) for kept in rounds))

    @property
    def tokens(self) -> list[tuple[Any, ...]]:
        return [token for kept in self.rounds for token in kept.tokens]

    @property
    def calls(self) -> int:
        return sum(kept.calls for kept in self.rounds)

    @property
    def per_call(self) -> float:
        told = sum(len(row) for kept in self.rounds if kept.calls for row in kept.tokens)
        return told / max(self.calls, 1)

    def mean(self, part: str, count: int) -> float:
        return median(self.parts[part]) / max(count, 1)


def _point(
    window: int, refill: int, plain: _TimedRun, waits: _TimedRun, ahead: _TimedRun
) -> OverlapPoint:
    drafted = sum(max(kept.drafted) for kept in waits.rounds)
    step, verify = plain.mean("verify", plain.calls), waits.mean("verify", waits.calls)
    costs = ComponentCosts(waits.mean("draft", drafted), step, max(verify - step, 0.0) / window)
    clock = sequential(waits.rounds, costs) / overlapped(ahead.rounds, costs, window, refill)
    same = _flat(waits) == _flat(ahead) == _flat(plain)
    return OverlapPoint(
        window,
        draft_ms=1e3 * costs.draft,
        target_ms=1e3 * step,
        verify_ms=1e3 * costs.verify(window),
        tokens_per_call=waits.per_call,
        tokens_per_call_ahead=ahead.per_call,
        predicted=clock,
        measured=median(waits.decode) / median(ahead.decode),
        identical=same,
    )


def _flat(run: _TimedRun) -> list[Any]:
    """The tokens of all requests, in order."""
    return [token for row in run.tokens for token in row]
