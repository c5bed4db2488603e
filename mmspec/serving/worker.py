"""Requests that run one after the other, in a thread, with a limit of those that wait."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

from mmspec.serving.ticket import QueueFull

T = TypeVar("T")


class SerialQueue:
    """Runs functions one by one in a thread; at most `max_queue` wait."""

    def __init__(self, max_queue: int = 64) -> None:
        self.max_queue = max_queue
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="mmspec-worker")
        self.lock, self.taken, self.seconds = Lock(), 0, 1.0

    def submit(self, run: Callable[[], T]) -> Future[T]:
        """Queue a function. Raises QueueFull."""
        with self.lock:
            if self.taken > self.max_queue:
                raise QueueFull(
                    f"{self.taken - 1} requests wait, which is the limit (max_queue="
                    f"{self.max_queue}); try again later",
                    self.seconds,
                )
            self.taken += 1
        future = self.pool.submit(self._run, run)
        future.add_done_callback(self._leave)
        return future

    def _run(self, run: Callable[[], T]) -> T:
        start = monotonic()
        try:
            return run()
        finally:
            self.seconds = monotonic() - start

    def _leave(self, _: Any) -> None:
        with self.lock:
            self.taken -= 1

    def close(self) -> None:
        """Finish what was taken."""
        self.pool.shutdown(wait=True)
