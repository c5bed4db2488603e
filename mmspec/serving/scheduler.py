"""Which request is read next: priorities, and limits of rows, slots and prompts.

The owner takes one request at a time and reports when it leaves: `mmspec.serving.engine.Engine`
runs forwards in between, a simulation may only count their time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from mmspec.errors import check_number


class Scheduled(Protocol):
    """A request as its scheduler sees it; the one that is less than another is read first."""

    @property
    def prompt_slots(self) -> int:
        """Slots of its prompt."""

    @property
    def slots(self) -> int:
        """Slots of the cache that it may fill."""

    def __lt__(self, other: Any, /) -> bool: ...


T = TypeVar("T", bound=Scheduled)
REGROW = 4  # times the requests that fit, until one more is tried


@dataclass(frozen=True)
class Limits:
    """The limits of an engine, as of `mmspec.Engine`."""

    max_rows: int = 8
    max_slots: int | None = None
    max_queue: int = 64
    max_prompt_slots: int = 2048

    def __post_init__(self) -> None:
        check_number("max_rows", self.max_rows, 1, whole=True, example=8)
        check_number("max_queue", self.max_queue, 0, whole=True, example=64)
        check_number("max_prompt_slots", self.max_prompt_slots, 1, whole=True, example=2048)
        if self.max_slots is not None:
            check_number("max_slots", self.max_slots, 1, whole=True, example=32768)


class Scheduler(Generic[T]):
    """The requests that wait and those that run. Not safe for threads: its owner locks it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: list[T] = []  # a heap
        self.running: set[T] = set()
        self._used_slots = 0
        self._prompt_slots_left = 0
        self._is_short_of_memory = False
        self.fitting_rows = limits.max_rows  # requests that memory holds, as far as is known
        self._left = 0  # requests that left since that changed

    @property
    def free_rows(self) -> int:
        """Requests that may still run."""
        return max(min(self.limits.max_rows, self.fitting_rows) - len(self.running), 0)

    @property
    def has_place(self) -> bool:
        """Whether a further request may wait."""
        return len(self.waiting) < self.limits.max_queue + self.free_rows

    @property
    def has_room(self) -> bool:
        """Whether the cache has room for the first request that waits."""
        if self._is_short_of_memory and self.running:
            return False
        most = self.limits.max_slots
        return most is None or self._used_slots + self.waiting[0].slots <= most

    def push(self, item: T) -> None:
        """Let a request wait."""
        heapq.heappush(self.waiting, item)

    def start_turn(self) -> None:
        """Begin to read prompts, up to `max_prompt_slots`, or a longer one."""
        self._prompt_slots_left = self.limits.max_prompt_slots

    def take_next(self) -> T | None:
        """The next request that there is room for, which runs from now on, or None.

        The first one waits for its room; none overtakes it.
        """
        if not self.waiting or not self.free_rows:
            return None
        left, size = self._prompt_slots_left, self.waiting[0].prompt_slots
        if size > left and left < self.limits.max_prompt_slots:  # a longer one is read in chunks
            return None
        if not self.has_room:
            return None
        item = heapq.heappop(self.waiting)
        self.running.add(item)
        self._used_slots += item.slots
        self._prompt_slots_left -= item.prompt_slots
        return item

    def put_back(self, *items: T) -> None:
        """Let running requests wait until another one leaves: their memory was not there.

        Fewer run from now on; one more is tried after `REGROW` times as many have left.
        """
        self.fitting_rows, self._left = max(len(self.running) - 1, 1), 0
        for item in items:
            self._remove(item)
            self.push(item)
        self._is_short_of_memory = True

    def leave(self, item: T) -> None:
        """Remove a running request."""
        self._remove(item)
        self._is_short_of_memory = False
        self._left += 1
        if self.fitting_rows < self.limits.max_rows and self._left >= REGROW * self.fitting_rows:
            self.fitting_rows, self._left = self.fitting_rows + 1, 0

    def _remove(self, item: T) -> None:
        self.running.remove(item)
        self._used_slots -= item.slots

    def drop_waiting(self, has_ended: Callable[[T], bool]) -> list[T]:
        """Remove the waiting requests that have ended, and return them."""
        ended = [item for item in self.waiting if has_ended(item)]
        if ended:
            gone = set(ended)
            self.waiting = [item for item in self.waiting if item not in gone]
            heapq.heapify(self.waiting)
        return ended

    def clear(self) -> list[T]:
        """Remove all requests, and return them."""
        items = [*self.waiting, *self.running]
        self.waiting, self.running = [], set()
        self._used_slots, self._is_short_of_memory = 0, False
        return items
