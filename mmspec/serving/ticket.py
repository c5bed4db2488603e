"""Requests on their way through an engine, and what comes out."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from mmspec.serving.batch import Row, TokenScores
from mmspec.stats import Stats


class QueueFull(ValueError):
    """The queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TimeoutError):
    """A request did not end in time; `tokens` holds its new tokens so far."""

    def __init__(self, message: str, tokens: list[int]) -> None:
        super().__init__(message)
        self.tokens = tokens


class MemoryExceeded(RuntimeError):
    """A request for which memory is too small, even alone."""


@dataclass(frozen=True)
class Completion:
    """The output of one request."""

    sequences: Tensor  # (1, L + T), as of `generate`
    tokens: list[int]  # the new ones
    stats: Stats  # seconds are those of the rounds, which other requests shared
    token_scores: TokenScores  # per new token, if `logprobs` was given
    queue_seconds: float  # before its prompt was read
    first_token_seconds: float  # from submission
    seconds: float  # from submission


@dataclass
class Counters:
    """What an engine has done so far."""

    submitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0  # the queue was full
    restarted: int = 0  # begun again, as memory was short
    largest_slots: int = 0  # of the cache that a completed request filled
    rounds: int = 0
    row_rounds: int = 0  # rounds, once per row
    prompt_forwards: int = 0  # of one prompt, or of several together
    prompt_tokens: int = 0
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(eq=False)
class Ticket:
    """A request on its way through the engine."""

    planned: Any  # a `PlannedRequest`
    row: Row
    priority: int
    number: int
    prompt_slots: int
    slots: int  # of the cache, at most
    deadline: float | None  # of `time.monotonic`
    kind: Any = None  # of those that its prompt may be read with; None: it is read alone
    submitted_at: float = field(default_factory=monotonic)
    started_at: float | None = None
    has_run_alone: bool = False  # when memory was short
    future: Future[Completion] = field(default_factory=Future)

    def __lt__(self, other: Ticket) -> bool:
        return (-self.priority, self.number) < (-other.priority, other.number)

    @property
    def max_new_tokens(self) -> int:
        """The limit of its new tokens."""
        limit: int = self.row.call.request.max_new_tokens  # type: ignore[attr-defined]
        return limit

    def explain(self, error: BaseException, largest: int) -> BaseException:
        """The error, with the request's size where memory was short."""
        if not is_out_of_memory(error):
            return error
        made = MemoryExceeded(
            f"memory is too small for this request alone: it may fill {self.slots} slots "
            f"({self.prompt_slots} of its prompt, max_new_tokens={self.max_new_tokens}), and the "
            f"largest one that ran filled {largest}; give a shorter prompt or fewer tokens"
        )
        made.__cause__ = error
        return made

    def has_ended(self, now: float) -> bool:
        """Whether it was cancelled, or is late."""
        return self.future.cancelled() or (self.deadline is not None and now > self.deadline)

    def complete(self) -> bool:
        """Set the result; False for a request that was cancelled."""
        row, now = self.row, monotonic()
        output = self.planned.make_output([row.tokens], row.ledger.stats())
        begun = self.started_at or now
        result = Completion(
            sequences=output.sequences,
            tokens=row.tokens,
            stats=output.stats,
            token_scores=row.scores,
            queue_seconds=begun - self.submitted_at,
            first_token_seconds=(row.first_token_at or now) - self.submitted_at,
            seconds=now - self.submitted_at,
        )
        try:
            self.future.set_result(result)
        except (InvalidStateError, CancelledError):
            return False
        return True

    def expire(self) -> bool:
        """Fail as it is late; False for a request that was cancelled."""
        tokens, now = list(self.row.tokens), monotonic()
        waited = (self.started_at or now) - self.submitted_at
        return self.fail(
            DeadlineExceeded(
                f"the request did not end in time: after {now - self.submitted_at:.1f} s, of which "
                f"it waited {waited:.1f} for its turn, it has {len(tokens)} of at most "
                f"{self.max_new_tokens} tokens; give it more time, or fewer tokens",
                tokens,
            )
        )

    def fail(self, error: BaseException) -> bool:
        """Set an error; False for a request that was cancelled."""
        try:
            self.future.set_exception(error)
        except (InvalidStateError, CancelledError):
            return False
        return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of an allocator, of any device."""
    is_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or is_cpu
