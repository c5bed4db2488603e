"""Streams of requests to an engine in virtual time: its own scheduler, the cost model's seconds.

The classes that decide in `mmspec.serving.engine.Engine` (`Scheduler`, `PromptTimer`,
`PromptGroups.split`) decide here; instead of a forward, the clock goes on by its cost. With several
replicas and a random choice among them, each gets a Poisson stream of its share, so one replica is
simulated.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Any

from mmspec.bench.planning.costs import Decoding
from mmspec.errors import check_number
from mmspec.serving.prompts import PromptGroups, PromptTimer
from mmspec.serving.scheduler import Limits, Scheduler

DRAFT_SLOTS = 64  # of a request, as the engine counts
GROWTH = 1.25  # of the time of a request from the first third of a stream to the last


@dataclass(frozen=True)
class Stream:
    """Poisson arrivals of `rate` requests per second, of prompts and outputs of given means.

    Lengths are exponential around half of their mean, plus that half; `is_constant` gives every
    request the means.
    """

    rate: float
    requests: int = 1000
    prompt: int = 1024
    output: int = 256
    is_constant: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("rate", self.rate, 1e-9, example=10.0)
        for name in ("requests", "prompt", "output"):
            check_number(name, getattr(self, name), 1, whole=True, example=100)

    def arrivals(self) -> Iterator[Arrival]:
        """All requests in their order."""
        noise, now = random.Random(self.seed), 0.0
        for number in range(self.requests):
            now += noise.expovariate(self.rate)
            prompt, output = (self._draw(noise, mean) for mean in (self.prompt, self.output))
            yield Arrival(number, now, prompt, output)

    def _draw(self, noise: random.Random, mean: int) -> int:
        if self.is_constant:
            return mean
        return max(round(mean / 2 + noise.expovariate(2 / mean)), 1)


@dataclass(eq=False)
class Arrival:
    """A request: as the scheduler sees it, and its times."""

    number: int
    at: float
    prompt_slots: int
    output: int
    kind: int = 0  # all of one kind: they may be read together
    tokens: int = 0
    started_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0

    @property
    def slots(self) -> int:
        return self.prompt_slots + self.output + DRAFT_SLOTS

    def __lt__(self, other: Any) -> bool:
        return bool(self.number < other.number)


@dataclass
class Simulation:
    """The work of one engine, round by round.

    Args:
        decoding: The models, their device and costs.
        limits: Those of the engine.
        length: Tokens of a draft.
        acceptance: The probability of each, given those before it.
        seed: Of the accepted tokens.
    """

    decoding: Decoding
    limits: Limits
    length: int = 0
    acceptance: float = 0.0
    seed: int = 0
    now: float = 0.0
    busy: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by part of a turn
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by the limit
    rounds: int = 0
    row_rounds: int = 0
    refused: int = 0
    partial: tuple[Arrival, int] | None = None  # a long prompt, and its slots that were read
    done: list[Arrival] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler[Arrival](self.limits)
        self.timer = PromptTimer(lambda: self.now)
        self.noise = random.Random(self.seed)
        self._costs: dict[tuple[int, int], float] = {}

    def run(self, stream: Stream) -> Outcome:
        """Run until all requests that were taken have ended."""
        arrivals = stream.arrivals()
        coming = next(arrivals, None)
        while coming is not None or self.scheduler.waiting or self.scheduler.running:
            if coming is not None and not (self.scheduler.waiting or self.scheduler.running):
                self.now = max(self.now, coming.at)
            while coming is not None and coming.at <= self.now:
                self._submit(coming)
                coming = next(arrivals, None)
            self._turn()
        return Outcome.of(self, stream)

    def _submit(self, request: Arrival) -> None:
        if not self.scheduler.has_place:
            self.refused += 1
            return
        self.scheduler.push(request)

    def _turn(self) -> None:
        """As `Engine._turn`: prompts that it is time to read, then a round of all rows."""
        begun = self.now
        self.scheduler.start_turn()
        self._read_prompts()
        limit = self._find_limit() if self.scheduler.waiting else None
        rows = [one for one in self.scheduler.running if one.tokens]
        if rows:
            self._round(sorted(rows, key=lambda one: one.number))
        elapsed = self.now - begun
        self.busy += elapsed
        if limit is not None:
            self.waits[limit] += elapsed

    def _read_prompts(self) -> None:
        """As `PromptReader.read`: long prompts in chunks, one per turn."""
        if self.partial is not None:
            self._read_chunk(*self.partial)
            return
        ready = min(len(self.scheduler.waiting), self.scheduler.free_rows)
        if not self.timer.is_due(ready, len(self.scheduler.running)):
            return
        taken = [one for one in iter(self.scheduler.take_next, None) if one is not None]
        groups: Any = PromptGroups.split(taken)  # type: ignore[arg-type]
        for group in groups:
            if group[0].prompt_slots > self.limits.max_prompt_slots:
                group[0].started_at = self.now
                self._read_chunk(group[0], 0)
            else:
                self._read(group)

    def _read_chunk(self, request: Arrival, done: int) -> None:
        size = min(self.limits.max_prompt_slots, request.prompt_slots - done)
        self._spend("prompts", self.decoding.prefill(1, size, done))
        self.partial = (request, done + size)
        if done + size == request.prompt_slots:
            self.partial = None
            request.first_token_at, request.tokens = self.now, 1
            self._end(request)

    def _read(self, group: list[Arrival]) -> None:
        start = self.now
        longest = max(one.prompt_slots for one in group)
        self._spend("prompts", self.decoding.prefill(len(group), longest))
        self.timer.add(len(group), self.now - start)
        for request in group:
            request.started_at, request.first_token_at, request.tokens = start, self.now, 1
            self._end(request)

    def _round(self, rows: list[Arrival]) -> None:
        context = sum(one.prompt_slots + one.tokens for one in rows) / len(rows)
        host = self.decoding.target.device.host(len(rows))
        self._spend("host", host)
        self._spend("rounds", self._cost(len(rows), context) - host)
        self.rounds += 1
        self.row_rounds += len(rows)
        for request in rows:
            request.tokens += 1 + self._accept()
            self._end(request)

    def _cost(self, rows: int, context: float) -> float:
        key = (rows, round(context / 32))
        if key not in self._costs:
            self._costs[key] = self.decoding.round(rows, self.length, 32.0 * key[1])
        return self._costs[key]

    def _accept(self) -> int:
        """Accepted tokens of one draft."""
        count = 0
        while count < self.length and self.noise.random() < self.acceptance:
            count += 1
        return count

    def _end(self, request: Arrival) -> None:
        if request.tokens >= request.output and request in self.scheduler.running:
            request.ended_at = self.now
            self.scheduler.leave(request)
            self.done.append(request)

    def _spend(self, part: str, seconds: float) -> None:
        self.now += seconds
        self.spent[part] += seconds

    def _find_limit(self) -> str:
        """Why the first request that waits does not run."""
        if not self.scheduler.free_rows:
            return "rows"
        return "prompts" if self.scheduler.has_room else "cache"


@dataclass(frozen=True)
class Outcome:
    """What a simulated stream took. Seconds are from arrival; of all replicas, where it matters."""

    rate: float
    tokens_per_second: float
    completed: int
    refused: int
    p50_seconds: float
    p99_seconds: float
    p50_first_token: float
    p99_first_token: float
    mean_wait: float  # until the prompt is read
    rows_per_round: float
    utilisation: float
    shares: dict[str, float]  # of the busy time: prompts, rounds, host
    limit: str  # that held most waiting requests: none, rows, cache, prompts
    bottleneck: str  # what to have more of first

    @classmethod
    def of(cls, run: Simulation, stream: Stream) -> Outcome:
        """Summarise a run."""
        done = run.done
        total = [one.ended_at - one.at for one in done]
        first = [one.first_token_at - one.at for one in done]
        limit = max(run.waits, key=lambda name: run.waits[name]) if run.waits else "none"
        utilisation = run.busy / run.now if run.now else 0.0
        shares = {name: run.spent[name] / (run.busy or 1) for name in ("prompts", "rounds", "host")}
        return cls(
            rate=stream.rate,
            tokens_per_second=sum(one.tokens for one in done) / run.now,
            completed=len(done),
            refused=run.refused,
            p50_seconds=find_percentile(total, 50),
            p99_seconds=find_percentile(total, 99),
            p50_first_token=find_percentile(first, 50),
            p99_first_token=find_percentile(first, 99),
            mean_wait=fmean(one.started_at - one.at for one in done),
            rows_per_round=run.row_rounds / max(run.rounds, 1),
            utilisation=utilisation,
            shares=shares,
            limit=limit,
            bottleneck=_find_bottleneck(run, limit, shares),
        )


def _find_bottleneck(run: Simulation, limit: str, shares: dict[str, float]) -> str:
    """What the engine spends its time on, or waits for; none while it keeps up."""
    if not run.refused and not _is_behind(run.done):
        return "none"
    if limit == "cache":
        return "cache"
    part = max(shares, key=lambda name: shares[name])
    if part == "host":
        return "host"
    if part == "prompts":
        return "compute (prompts)"
    rows = max(round(run.row_rounds / max(run.rounds, 1)), 1)
    if limit == "rows" and not run.decoding.is_compute_bound(rows, run.length):
        return "rows"  # more of them would share the weights that a round reads
    return "compute" if run.decoding.is_compute_bound(rows, run.length) else "bandwidth"


def _is_behind(done: list[Arrival]) -> bool:
    """Whether requests wait longer than they run, or later ones take longer than the first."""
    waits = fmean(one.started_at - one.at for one in done)
    if waits > fmean(one.ended_at - one.started_at for one in done):
        return True
    seconds = [one.ended_at - one.at for one in sorted(done, key=lambda one: one.number)]
    third = max(len(seconds) // 3, 1)
    return fmean(seconds[-third:]) > GROWTH * fmean(seconds[:third])


def find_percentile(values: list[float], percent: int) -> float:
    """Seconds that so many percent take at most; nan without any."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=100, method="inclusive")[percent - 1]
