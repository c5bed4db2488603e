"""Loads of a server, and servers of static batches: clients in a loop, and a Poisson process.

A static batch runs until its longest row has ended; then those that wait are the next one.
"""

from __future__ import annotations

import math
import queue
import random
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Protocol, Self

import torch

from mmspec.accelerated import Accelerated
from mmspec.serving.batch import Row, RowBatch
from mmspec.serving.check import planning_session
from mmspec.streaming import ThreadState
from mmspec.targets.tokens.context import make_word_ids
from mmspec.targets.tokens.merge import merge_requests

Request = Mapping[str, Any]
SHORTEST, LONGEST = 1 / 16, 2  # of ragged outputs, as shares of the usual limit


class Server(Protocol):
    """What requests are sent to: an `Engine`, or `BatchServer`."""

    def submit(self, request: Any, /) -> Future[Any]:
        """Queue a request; its result has `tokens`, `seconds` and `first_token_seconds`."""


@dataclass(frozen=True)
class ServedRequest:
    """The output of one request of a `BatchServer`."""

    tokens: list[int]
    first_token_seconds: float
    seconds: float


class BatchServer:
    """Runs the requests that wait in static batches of at most `max_rows`, in their order.

    A row's result is set at its own end. Raises what the prompts raise: they must be of one kind.
    """

    def __init__(self, fast: Accelerated, max_rows: int) -> None:
        self.session, self.max_rows = planning_session(fast), max_rows
        self.waiting: queue.Queue[tuple[Row, float, Future[Any]] | None] = queue.Queue()
        self.state = ThreadState()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def submit(self, request: Request) -> Future[ServedRequest]:
        start = monotonic()
        with torch.no_grad():
            row = Row(self.session.plan(dict(request)).call)
        future: Future[ServedRequest] = Future()
        self.waiting.put((row, start, future))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.waiting.put(None)
        self.thread.join()

    def _work(self) -> None:
        with self.state.enter(), torch.no_grad():
            while (first := self.waiting.get()) is not None:
                taken = [first]
                while len(taken) < self.max_rows and not self.waiting.empty():
                    if (item := self.waiting.get()) is None:
                        self.waiting.put(None)
                        break
                    taken.append(item)
                try:
                    self._run(taken)
                except Exception as error:
                    for _, _, future in taken:
                        if not future.done():
                            future.set_exception(error)

    def _run(self, taken: Sequence[tuple[Row, float, Future[Any]]]) -> None:
        rows = [row for row, _, _ in taken]
        requests: list[Any] = [row.call.request for row in rows]
        filler = make_word_ids(self.session.bound.backbone, 1)[0]
        batch = RowBatch(rows, merge_requests(requests, filler))
        left = list(taken)
        while left:
            for item in [item for item in left if item[0].is_finished]:
                left.remove(item)
                row, start, future = item
                begun = row.first_token_at or monotonic()
                future.set_result(ServedRequest(row.tokens, begun - start, monotonic() - start))
            if left:
                batch.step()


def make_ragged(requests: Sequence[Request], seed: int) -> list[Request]:
    """The requests with outputs of different lengths, which no end token shortens.

    Lengths are log-uniform between a sixteenth of the usual limit and twice that.
    """
    choose, made = random.Random(seed), list[Request]()
    for one in requests:
        limit = one["max_new_tokens"]
        low, high = math.log(max(limit * SHORTEST, 1)), math.log(limit * LONGEST)
        count = round(math.exp(choose.uniform(low, high)))
        made.append({**one, "max_new_tokens": count, "min_new_tokens": count})
    return made


def run_clients(
    server: Server, requests: Sequence[Request], clients: int, seed: int
) -> list[Any]:  # a result per request
    """Let so many clients send requests, each one after the other; returns the results."""
    left, lock = list(enumerate(requests))[::-1], threading.Lock()
    found: dict[int, Any] = {}

    def work() -> None:
        while True:
            with lock:
                if not left:
                    return
                index, request = left.pop()
            found[index] = server.submit({**request, "seed": seed}).result()

    threads = [threading.Thread(target=work) for _ in range(min(clients, len(requests)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(requests))]


def run_poisson(
    server: Server, requests: Sequence[Request], rate_hz: float, seed: int
) -> list[Any]:  # a result per request
    """Send requests at the times of a Poisson process; returns the results."""
    choose, at, start = random.Random(seed), 0.0, monotonic()
    futures = []
    for request in requests:
        at += choose.expovariate(rate_hz)
        sleep(max(start + at - monotonic(), 0))
        futures.append(server.submit({**request, "seed": seed}))
    return [future.result() for future in futures]
