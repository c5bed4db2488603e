"""Many requests to one accelerated model, decoded as one batch whose rows join and leave.

    engine = mmspec.Engine(mmspec.accelerate(model, "prompt-lookup"))
    futures = [engine.submit({**inputs, "max_new_tokens": 64}) for inputs in requests]
    [future.result().sequences for future in futures]

One thread decodes. Between two rounds it drops what was cancelled or has expired and reads prompts
of waiting requests, several in one forward (`mmspec.serving.prompts`); then it runs a round of
every batch. The randomness of a request is keyed by its own seed, so its tokens do not depend on
the rows it runs with, up to the rounding of forwards over several rows.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Any, Self

import torch

from mmspec.accelerated import check_call_arguments
from mmspec.draft import Round
from mmspec.errors import check_number
from mmspec.serving.batch import Row, RowBatch
from mmspec.serving.check import check_joins_rows, count_slots, planning_session
from mmspec.serving.prompts import PrefillReader
from mmspec.serving.scheduler import Limits, Scheduler
from mmspec.serving.ticket import (
    Completion,
    Counters,
    QueueFull,
    Ticket,
    is_out_of_memory,
)
from mmspec.streaming import ThreadState, take_turns
from mmspec.targets.call_stack import reserve_stack
from mmspec.targets.rows import CannotJoin
from mmspec.targets.stop import check_seconds

log = logging.getLogger("mmspec")


class Engine:
    """Decodes requests of one row together, as they come.

    Args:
        fast: What `mmspec.accelerate` returned for a text, vision-language or codec language
            model. Its recipe is that of all requests.
        max_rows: Requests that are decoded at a time.
        max_slots: Slots of the cache of all of them: tokens of prompts and outputs, and 64 for each
            draft. A request waits until there is room. Default: no limit but `max_rows`.
        max_queue: Requests that may wait.
        max_prompt_slots: Slots of prompts that are read between two rounds; longer prompts are read
            in chunks of so many. Less lets running requests wait shorter, and new ones longer.

    `counters` has the work done so far. Requests are decoded greedily or sampled in two batches,
    as greedy and sampled rows are verified differently. With a recipe that does not couple its
    noise (`verifier.couples`), sampled tokens may differ from those alone where a draft ends at
    `max_new_tokens`; their distribution does not.

    Raises ValueError at construction for a recipe whose requests cannot run as one batch, found by
    running two short ones.
    """

    def __init__(
        self,
        fast: Any,
        *,
        max_rows: int = 8,
        max_slots: int | None = None,
        max_queue: int = 64,
        max_prompt_slots: int = 2048,
    ) -> None:
        self.limits = Limits(max_rows, max_slots, max_queue, max_prompt_slots)
        self.session = planning_session(fast)
        check_joins_rows(self.session)
        self.counters = Counters()
        self._wake = threading.Condition()
        self._scheduler = Scheduler[Ticket](self.limits)
        self._tickets: dict[Row, Ticket] = {}  # of those that run
        self._batches: list[RowBatch] = []
        self._prompts = PrefillReader(self.session, self.limits.max_prompt_slots)
        self._count = 0
        self._is_closed = False
        self._durations: deque[float] = deque(maxlen=64)
        self._state = ThreadState()
        surroundings = contextvars.copy_context()
        self._thread = threading.Thread(
            target=surroundings.run, args=(self._work,), name="mmspec-engine", daemon=True
        )
        self._thread.start()

    def submit(
        self,
        request: Mapping[str, Any],
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        on_round: Callable[[Round], Any] | None = None,
        logprobs: int | None = None,
    ) -> Future[Completion]:
        """Queue a request; its result is a `Completion`.

        Args:
            request: The arguments of `generate`, of one row: input tensors, `max_new_tokens`,
                sampling settings, `seed`, stop conditions; or those of `synthesize`, with `text`.
            priority: Requests of higher priority are read first.
            timeout_s: Seconds from now until the request fails with `DeadlineExceeded`.
            on_round: Called with every `Round` of the request, in the engine's thread.
            logprobs: Also return the log-probability of each new token in the distribution that it
                was taken from, and of so many likeliest ones.

        `cancel()` of the future drops the request after the current round.

        Raises:
            ValueError: A request that `generate` refuses, has several rows or outputs that need a
                run of its own, or exceeds `max_slots`. `QueueFull` if `max_queue` requests wait.
        """
        check_number("priority", priority, whole=True, example=0)
        check_call_arguments(request.get("seed"), request.get("row_ids"), on_round)
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        if logprobs is not None:
            check_number("logprobs", logprobs, 0, whole=True, example=5)
        with self._wake:
            self._check_open()
        with torch.no_grad():
            planned = self.session.plan(dict(request))
        sizes = count_slots(planned, self.limits.max_slots)
        row, kind = (
            Row(planned.call, on_round, logprobs),
            self._prompts.groups.find_kind(planned.call),
        )
        now = monotonic()
        with self._wake:
            self._check_open()
            if not self._scheduler.has_place:
                self.counters.refused += 1
                raise QueueFull(
                    f"{self.num_waiting} requests wait, which is the limit (max_queue="
                    f"{self.limits.max_queue}); try again later",
                    self._estimate_wait(),
                )
            self._count += 1
            self.counters.submitted += 1
            end = None if timeout_s is None else now + timeout_s
            ticket = Ticket(planned, row, priority, self._count, *sizes, end, kind, now)
            self._scheduler.push(ticket)
            self._wake.notify()
        ticket.future.add_done_callback(lambda _: self._notify())
        return ticket.future

    def stream(
        self, request: Mapping[str, Any], **options: Any
    ) -> Generator[Round, None, Completion]:
        """Queue a request and yield each of its rounds; returns its `Completion`.

        Takes the options of `submit`. Closing the generator cancels the request.
        """
        rounds: SimpleQueue[Round | None] = SimpleQueue()
        future = self.submit(request, **options, on_round=rounds.put)
        future.add_done_callback(lambda _: rounds.put(None))
        try:
            while (round_ := rounds.get()) is not None:
                yield round_
        finally:
            future.cancel()
        return future.result()

    @property
    def num_waiting(self) -> int:
        """Requests whose prompt is not read yet."""
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that are decoded."""
        return len(self._scheduler.running)

    def close(self, finish: bool = True) -> None:
        """Take no further requests, and wait until those taken have ended.

        With `finish=False` they are cancelled.
        """
        with self._wake:
            self._is_closed = True
            taken = [*self._scheduler.waiting, *self._scheduler.running]
            self._wake.notify()
        if not finish:
            for ticket in taken:
                ticket.future.cancel()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(finish=kind is None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this engine was closed; make another one: mmspec.Engine(fast)")

    def _estimate_wait(self) -> float:
        """Seconds until a place in the queue is free."""
        mean = sum(self._durations) / len(self._durations) if self._durations else 1.0
        return max(mean / self.limits.max_rows, 0.1)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    @reserve_stack
    def _work(self) -> None:
        """The engine's thread: one turn after the other, while there is work."""
        models = self.session.bound.models
        turns = take_turns(models, iter(self._turn, False))
        try:
            with self._state.enter(), torch.no_grad():
                while self._wait_for_work():
                    next(turns)
        except BaseException as error:  # nothing may wait for a thread that has ended
            self._fail_all(error)
            raise

    def _wait_for_work(self) -> bool:
        """Wait until something is queued or runs; False once closed and empty."""
        with self._wake:
            while not (self.num_waiting or self.num_running):
                if self._is_closed:
                    return False
                self._wake.wait()
            return True

    def _turn(self) -> bool:
        self._drop_ended()
        self._scheduler.start_turn()
        self._read_prompts()
        for batch in list(self._batches):
            self._step(batch)
        return True

    def _drop_ended(self) -> None:
        """Drop what was cancelled or is late."""
        now = monotonic()
        with self._wake:
            ended = self._scheduler.drop_waiting(lambda ticket: ticket.has_ended(now))
        for ticket in ended:
            self._expire(ticket)
        if (partial := self._prompts.drop_partial(now)) is not None:
            self._expire(self._release(partial.row))
        for batch in list(self._batches):
            for row in list(batch.rows):
                if (ticket := self._tickets[row]).has_ended(now):
                    self._leave(batch, row)
                    self._expire(ticket)

    def _expire(self, ticket: Ticket) -> None:
        if ticket.future.cancelled():
            self.counters.cancelled += 1
        elif ticket.expire():
            self.counters.expired += 1

    def _take_next(self) -> Ticket | None:
        with self._wake:
            ticket = self._scheduler.take_next()
        if ticket is not None:
            self._tickets[ticket.row] = ticket
        return ticket

    def _read_prompts(self) -> None:
        """Read prompts of waiting requests; their rows join the batches."""
        with self._wake:
            ready = min(len(self._scheduler.waiting), self._scheduler.free_rows)
        for tickets, found in self._prompts.read(ready, len(self._tickets), self._take_next):
            if isinstance(found, Exception):
                self._recover([ticket.row for ticket in tickets], found)
            else:
                self._enter(found, tickets)

    def _enter(self, batch: RowBatch, tickets: Sequence[Ticket]) -> None:
        """Let the rows of prompts that were read run."""
        self.counters.prompt_forwards += 1
        for ticket in tickets:
            self.counters.prompt_tokens += ticket.prompt_slots
            self.counters.new_tokens += len(ticket.row.tokens)
        self._batches.append(batch)
        self._deliver(batch)
        if batch.rows:
            self._join(batch)

    def _join(self, batch: RowBatch) -> None:
        """Let the rows of a new batch join one that they can run in."""
        for other in self._batches[:-1]:
            try:
                other.join(batch)
            except CannotJoin:
                continue
            except Exception as error:
                self._recover([*other.rows, *batch.rows], error)
                return
            self._batches.remove(batch)
            return

    def _recover(self, rows: Sequence[Row], error: Exception) -> None:
        """Drop the rows of a forward that failed, and their batches: nothing of them is known now.

        Where memory was short they begin again, a request that ran alone once more; else they fail.
        """
        gone, is_alone = set(rows), len(self._tickets) == 1
        self._batches = [one for one in self._batches if not gone.intersection(one.rows)]
        tickets = [self._tickets.pop(row) for row in rows]
        if is_out_of_memory(error) and not (is_alone and tickets[0].has_run_alone):
            for ticket in tickets:
                self.counters.new_tokens -= len(ticket.row.tokens)
                ticket.row, ticket.has_run_alone = ticket.row.restart(), is_alone
            self.counters.restarted += len(tickets)
            with self._wake:
                self._scheduler.put_back(*tickets)
            rows_now = self._scheduler.fitting_rows
            log.warning("memory is short: %d requests begin again, %d at once", len(rows), rows_now)
            return
        with self._wake:
            for ticket in tickets:
                self._scheduler.leave(ticket)
        for ticket in tickets:
            self._fail(ticket, ticket.explain(error, self.counters.largest_slots))

    def _step(self, batch: RowBatch) -> None:
        try:
            round_ = batch.step()
        except Exception as error:  # of the target or the verifier
            self._recover(batch.rows, error)
            return
        self.counters.rounds += 1
        self.counters.row_rounds += len(batch.rows)
        self.counters.drafted += sum(round_.drafted)
        self.counters.accepted += sum(round_.accepted)
        self.counters.new_tokens += sum(map(len, round_.tokens))
        self._deliver(batch)

    def _deliver(self, batch: RowBatch) -> None:
        """Let rows that have ended leave, and set their results."""
        for row in [row for row in batch.rows if row.is_finished]:
            ticket = self._tickets[row]
            self._leave(batch, row)
            if row.error is not None:
                self._fail(ticket, row.error)
            elif ticket.complete():
                self.counters.completed += 1
                filled = ticket.prompt_slots + len(row.tokens)
                self.counters.largest_slots = max(self.counters.largest_slots, filled)
                self._durations.append(monotonic() - ticket.submitted_at)
            else:
                self.counters.cancelled += 1

    def _leave(self, batch: RowBatch, row: Row) -> None:
        batch.drop(row)
        self._release(row)
        if not batch.rows:
            self._batches.remove(batch)

    def _release(self, row: Row) -> Ticket:
        """Give the room of a row to others."""
        ticket = self._tickets.pop(row)
        with self._wake:
            self._scheduler.leave(ticket)
        return ticket

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        if ticket.fail(error):
            self.counters.failed += 1
        else:
            self.counters.cancelled += 1

    def _fail_all(self, error: BaseException) -> None:
        with self._wake:
            self._is_closed = True
            taken = self._scheduler.clear()
            self._tickets, self._batches = {}, []
        for ticket in taken:
            self._fail(ticket, error)
