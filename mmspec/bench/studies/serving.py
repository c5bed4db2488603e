"""Many requests at once: the engine beside one request at a time, static batches, and transformers.

A fixed number of clients send a request each, and the next one when that has ended. The baselines
run in a fixed order, so their latencies follow from measured times: one at a time, a client waits
for those before it; in static batches, for its own batch and those before it. With ragged outputs
or at random times, the baselines are servers as well (`mmspec.bench.studies.arrivals`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import quantiles
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.accelerated import Accelerated
from mmspec.bench.reporting import Progress, Report, describe_environment, silent
from mmspec.bench.studies.arrivals import (
    BatchServer,
    Request,
    Server,
    make_ragged,
    run_clients,
    run_poisson,
)
from mmspec.errors import first_line
from mmspec.serving.engine import Engine

CONCURRENCIES = (1, 4, 8, 16)
STATIC = 8  # rows of a static batch
ENGINE, ALONE, BATCHES, LIBRARY = (
    "engine",
    "one at a time",
    f"static batches of {STATIC}",
    "generate_batch",
)


@dataclass(frozen=True)
class LoadPoint:
    """One method under one number of clients."""

    method: str
    concurrency: int
    tokens: int
    seconds: float
    latencies: tuple[float, ...] = field(repr=False)  # seconds of every request, sorted
    rows_per_round: float | None = None  # of the engine
    acceptance: float | None = None  # accepted draft tokens / drafted, of the engine
    rejected: float | None = None  # drafted tokens that were not accepted, per request
    identical: float | None = None  # share of requests whose tokens are those alone
    rate_hz: float | None = None  # of requests at random times; `concurrency` is then of rows
    first_tokens: tuple[float, ...] = field(default=(), repr=False)  # seconds, sorted
    cpu_seconds: float | None = None  # of the process

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def percentile(self, percent: int) -> float:
        """Seconds that so many percent of the requests take at most."""
        return _percentile(self.latencies, percent)

    def first_token_percentile(self, percent: int) -> float | None:
        """The same until their first token, where that is known."""
        return _percentile(self.first_tokens, percent) if self.first_tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "method": self.method,
            "concurrency": self.concurrency,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "p50_seconds": self.percentile(50),
            "p99_seconds": self.percentile(99),
            "rows_per_round": self.rows_per_round,
            "acceptance": self.acceptance,
            "rejected_per_request": self.rejected,
            "identical": self.identical,
            "rate_hz": self.rate_hz,
            "first_token_p50_seconds": self.first_token_percentile(50),
            "first_token_p99_seconds": self.first_token_percentile(99),
            "cpu_seconds": self.cpu_seconds,
        }


@dataclass(frozen=True)
class ServingStudy(Report):
    """All points, and why a method is missing."""

    model: str
    recipe: str
    requests: int
    points: tuple[LoadPoint, ...]
    skipped: Mapping[str, str]
    environment: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model,
            "recipe": self.recipe,
            "requests": self.requests,
            "points": [one.to_dict() for one in self.points],
            "skipped": dict(self.skipped),
            "environment": dict(self.environment),
        }


def measure_serving(
    fast: Accelerated,
    requests: Sequence[Request],
    batches: Sequence[Request],
    *,
    model: str,
    concurrencies: Sequence[int] = CONCURRENCIES,
    rates_hz: Sequence[float] = (),
    ragged: bool = False,
    seed: int = 0,
    progress: Progress = silent,
) -> ServingStudy:
    """Measure an engine and its baselines on the same requests.

    `requests` are arguments of `generate` of one row each, `batches` the same requests in static
    batches of up to `STATIC`, in their order. With `ragged` their outputs differ in length
    (`arrivals.make_ragged`). `rates_hz` are requests per second of a Poisson process, to servers of
    `STATIC` rows. Every method runs once before it is measured. Raises ValueError for a model whose
    requests are no token ids.
    """
    if "input_ids" not in requests[0]:
        raise ValueError(
            f"{type(fast.model).__name__} reads no input_ids, which requests to a server are; give "
            "a language or vision-language model, or measure this one with `mmspec bench`"
        )
    if ragged:
        requests = make_ragged(requests, seed)
    points, skipped = list[LoadPoint](), dict[str, str]()
    fast.generate(**requests[0], seed=seed)
    alone = [_time_call(fast, one, seed) for one in requests]
    outputs = [tokens for _, tokens in alone]
    fast.generate(**batches[0], seed=seed)
    static = [] if ragged else [_time_call(fast, one, seed) for one in batches]
    for done, concurrency in enumerate(concurrencies):
        progress("clients", done, len(concurrencies))
        load = Load(requests, outputs, concurrency, None, seed)
        points.append(_measure_engine(fast, load))
        if ragged:
            points += _measure_batches(fast, load)
            continue
        points.append(_one_at_a_time(alone, concurrency))
        if concurrency >= STATIC:
            points.append(_in_batches(static, batches, concurrency))
    for rate_hz in rates_hz:
        load = Load(requests, outputs, STATIC, rate_hz, seed)
        points += [_measure_engine(fast, load), *_measure_batches(fast, load)]
    try:
        points.append(_time_library(fast.model, requests))
    except Exception as error:  # it refuses models, kernels and inputs in many ways
        skipped[LIBRARY] = first_line(error)
    recipe = fast.recipe.name or "custom"
    environment = describe_environment(fast.model.device)
    return ServingStudy(model, recipe, len(requests), tuple(points), skipped, environment)


def _time_call(fast: Accelerated, request: Request, seed: int) -> tuple[float, list[list[int]]]:
    """Seconds of a call, and the new tokens of each row, without padding."""
    tokens: list[list[int]] = []

    def note(round_: Any) -> None:
        for row, new in zip(tokens, round_.tokens, strict=True):
            row.extend(new)

    tokens = [[] for _ in request["input_ids"]]
    start = perf_counter()
    fast.generate(**request, seed=seed, on_round=note)
    return perf_counter() - start, tokens


def _one_at_a_time(timed: Sequence[tuple[float, list[list[int]]]], clients: int) -> LoadPoint:
    seconds = [one for one, _ in timed]
    waits = [sum(seconds[max(at - clients + 1, 0) : at + 1]) for at in range(len(seconds))]
    return LoadPoint(ALONE, clients, _count(timed), sum(seconds), tuple(sorted(waits)))


def _in_batches(
    timed: Sequence[tuple[float, list[list[int]]]], batches: Sequence[Request], clients: int
) -> LoadPoint:
    """`clients` / `STATIC` batches take turns."""
    seconds = [one for one, _ in timed]
    turns = max(clients // STATIC, 1)
    waits = [
        sum(seconds[max(at - turns + 1, 0) : at + 1])
        for at, batch in enumerate(batches)
        for _ in batch["input_ids"]
    ]
    return LoadPoint(BATCHES, clients, _count(timed), sum(seconds), tuple(sorted(waits)))


def _count(timed: Sequence[tuple[float, list[list[int]]]]) -> int:
    return sum(len(row) for _, rows in timed for row in rows)


@dataclass(frozen=True)
class Load:
    """Requests of so many clients, or at a rate, and the tokens of each alone."""

    requests: Sequence[Request]
    outputs: Sequence[list[list[int]]]
    concurrency: int
    rate_hz: float | None
    seed: int

    def warm(self, server: Server) -> None:
        """Run a few requests that are not measured."""
        run_clients(server, self.requests[: min(self.concurrency, 4)], self.concurrency, self.seed)

    def measure(self, method: str, server: Server) -> LoadPoint:
        """Run all requests."""
        start, used = perf_counter(), process_time()
        if self.rate_hz is None:
            found = run_clients(server, self.requests, self.concurrency, self.seed)
        else:
            found = run_poisson(server, self.requests, self.rate_hz, self.seed)
        seconds, used = perf_counter() - start, process_time() - used
        same = [one.tokens == own[0] for one, own in zip(found, self.outputs, strict=True)]
        return LoadPoint(
            method=method,
            concurrency=self.concurrency,
            tokens=sum(len(one.tokens) for one in found),
            seconds=seconds,
            latencies=tuple(sorted(one.seconds for one in found)),
            identical=sum(same) / len(same),
            rate_hz=self.rate_hz,
            first_tokens=tuple(sorted(one.first_token_seconds for one in found)),
            cpu_seconds=used,
        )


def _measure_engine(fast: Accelerated, load: Load) -> LoadPoint:
    with Engine(fast, max_rows=load.concurrency, max_queue=len(load.requests)) as engine:
        load.warm(engine)
        before = vars(engine.counters).copy()
        point = load.measure(ENGINE, engine)
        now = {name: value - before[name] for name, value in vars(engine.counters).items()}
    return replace(
        point,
        rows_per_round=now["row_rounds"] / max(now["rounds"], 1),
        acceptance=now["accepted"] / now["drafted"] if now["drafted"] else None,
        rejected=(now["drafted"] - now["accepted"]) / len(load.requests),
    )


def _measure_batches(fast: Accelerated, load: Load) -> list[LoadPoint]:
    """The same load one at a time, and in static batches where there are enough clients."""
    sizes = {ALONE: 1, BATCHES: STATIC}
    points = []
    for method, rows in sizes.items():
        if rows <= load.concurrency:
            with BatchServer(fast, rows) as server:
                load.warm(server)
                points.append(load.measure(method, server))
    return points


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _time_library(model: Any, requests: Sequence[Request]) -> LoadPoint:
    """Continuous batching of transformers, all requests at once.

    Raises ValueError for requests with media, and what transformers raises.
    """
    if len({one["max_new_tokens"] for one in requests}) > 1:
        raise ValueError("it takes one limit of new tokens, and these requests differ")
    others = {
        name
        for one in requests
        for name, value in one.items()
        if isinstance(value, Tensor) and name not in ("input_ids", "attention_mask")
    }
    if others:
        raise ValueError(f"it reads token ids only, and these requests have {min(others)}")
    prompts = [one["input_ids"][0].tolist() for one in requests]
    run: Callable[..., Any] = model.generate_batch
    config = _hf.merge_config(
        model, None, {"max_new_tokens": requests[0]["max_new_tokens"], "do_sample": False}
    )
    kernel = model.config._attn_implementation
    try:
        with torch.no_grad():
            run(prompts[:2], generation_config=config)
            start = perf_counter()
            found = run(prompts, generation_config=config)
            seconds = perf_counter() - start
    finally:  # it reads with a paged kernel
        model.set_attn_implementation(kernel)
    tokens = sum(len(one.generated_tokens) for one in found.values())
    return LoadPoint(LIBRARY, len(prompts), tokens, seconds, (seconds,) * len(prompts))
