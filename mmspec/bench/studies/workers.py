"""Throughput of several workers on this machine: actors of Ray Data, replicas of Ray Serve.

Every worker has one processor. Ray Data is timed from the moment when all actors have begun until
the first of them has ended, so the start of processes does not count.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any

import numpy as np

from mmspec.bench.reporting import Report
from mmspec.ray import Generate
from mmspec.serving.replicas import Replicas, build_application

BATCH = 8  # rows of a batch of Ray Data, and clients of each replica
DATA, SERVE = "Ray Data", "Ray Serve"


@dataclass(frozen=True)
class WorkerPoint(Report):
    """New tokens per second of one number of workers."""

    method: str
    workers: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class TimedGenerate(Generate):
    """`Generate` that also returns which process answered a batch, and when."""

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        begun = time()
        found = super().__call__(batch)
        count = len(found["num_tokens"])
        times = {"worker": os.getpid(), "begun": begun, "ended": time()}
        return {**found, **{name: np.full(count, value) for name, value in times.items()}}


def measure_data(
    rows: Sequence[Mapping[str, Any]], workers: int, model: str, **options: Any
) -> WorkerPoint:
    """Answer rows with so many actors. Raises ValueError where a row failed, or few are done."""
    from ray import data

    blocks = max(len(rows) // BATCH, workers)
    found = (
        data.from_items([dict(row) for row in rows], override_num_blocks=blocks)
        .map_batches(
            TimedGenerate,
            fn_constructor_args=(model,),
            fn_constructor_kwargs={**options, "threads": 1},
            concurrency=workers,
            batch_size=BATCH,
        )
        .take_all()
    )
    failed = next((row["error"] for row in found if row["error"] is not None), None)
    if failed is not None:
        raise ValueError(f"a row failed: {failed}")
    return count_together(found, workers)


def count_together(rows: Sequence[Mapping[str, Any]], workers: int) -> WorkerPoint:
    """Tokens of the batches that were answered while all workers ran.

    Raises ValueError where they did not run at the same time.
    """
    names = {row["worker"] for row in rows}
    start = max(min(row["begun"] for row in rows if row["worker"] == name) for name in names)
    end = min(max(row["ended"] for row in rows if row["worker"] == name) for name in names)
    inside = [row for row in rows if row["begun"] >= start and row["ended"] <= end]
    if len(names) < workers or not inside:
        raise ValueError(
            f"{len(rows)} rows are too few for {workers} workers to run at the same time; give more"
        )
    tokens = sum(int(row["num_tokens"]) for row in inside)
    seconds = max(row["ended"] for row in inside) - min(row["begun"] for row in inside)
    return WorkerPoint(DATA, workers, tokens, float(seconds))


def measure_serve(
    make_app: Any, models: Sequence[str], bodies: Sequence[Mapping[str, Any]], workers: int
) -> WorkerPoint:
    """Let `BATCH` clients per replica send chat requests, each one after the other."""
    from ray import serve

    server: Any = serve
    port = 18500 + workers
    server.start(http_options={"host": "127.0.0.1", "port": port})
    url = f"http://127.0.0.1:{port}/v1/chat/completions"

    def post(body: Mapping[str, Any]) -> int:
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=600) as reply:
            return int(json.load(reply)["usage"]["completion_tokens"])

    try:
        server.run(build_application(make_app, models, Replicas(workers)), name="bench")
        with ThreadPoolExecutor(BATCH * workers) as clients:
            list(clients.map(post, bodies[: 2 * workers]))  # not measured
            start = perf_counter()
            tokens = sum(clients.map(post, bodies))
            return WorkerPoint(SERVE, workers, tokens, perf_counter() - start)
    finally:
        server.shutdown()
