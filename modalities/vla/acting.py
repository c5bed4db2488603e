"""The rounds of one question, and what they were; stopped where the deadline is near."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

from mmspec.draft import Round
from mmspec.modalities.vla.step_stats import DRAFTED, TARGET, UNVERIFIED

LOOKED_BACK = 16  # rounds that say how long one may take


@dataclass
class Taken:
    """What the rounds brought for one robot."""

    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of each token: see `ActionStep.sources`
    rounds: int = 0
    target_calls: int = 0  # prefill aside
    accepted: list[int] = field(default_factory=list)  # of each round with a draft
    first_error: int | None = None
    unverified: int = 0

    def add(self, kept: Round, row: int) -> None:
        new = kept.tokens[row]
        if not new:
            return
        self.rounds += 1
        self.target_calls += kept.calls
        own = len(new) - len(kept.path[row])  # the target's
        self.sources += [UNVERIFIED if kept.skips else DRAFTED] * len(kept.path[row])
        self.sources += [TARGET] * own
        if kept.skips:
            self.unverified += len(new)
        elif kept.drafted[row]:
            accepted = kept.accepted[row]
            self.accepted.append(accepted)
            is_refused = kept.takes_next[row] and accepted < min(kept.depth, kept.drafted[row])
            if is_refused and self.first_error is None:
                self.first_error = len(self.tokens) + accepted
        self.tokens.extend(new)


class AnswerPace:
    """How long rounds took lately, in seconds; of all questions of a policy."""

    def __init__(self) -> None:
        self._lately: deque[float] = deque(maxlen=LOOKED_BACK)

    def note(self, seconds: float) -> None:
        self._lately.append(seconds)

    @property
    def slowest(self) -> float:
        return max(self._lately, default=0.0)


@dataclass(frozen=True)
class Deadline:
    """When an action must be there, on the clock of `perf_counter`; None = whenever it is."""

    begun: float
    limit_ms: float | None
    pace: AnswerPace

    @property
    def elapsed_ms(self) -> float:
        return 1e3 * (perf_counter() - self.begun)

    @property
    def is_missed(self) -> bool:
        return self.limit_ms is not None and self.elapsed_ms > self.limit_ms

    @property
    def is_near(self) -> bool:
        """Whether one more round, as slow as the slowest lately, would end behind it."""
        if self.limit_ms is None:
            return False
        return self.elapsed_ms + 1e3 * self.pace.slowest > self.limit_ms


def act(rounds: Iterable[Round], batch: int, deadline: Deadline, can_hold: bool) -> list[Taken]:
    """Follow the rounds of a question to their end, or until the deadline is near.

    A round cannot be broken off, and without an action to hold (`can_hold`) none is left out.
    """
    rows, last = [Taken() for _ in range(batch)], 0.0
    for kept in rounds:
        for row, taken in enumerate(rows):
            taken.add(kept, row)
        now = perf_counter()
        if kept.calls and kept.index:
            deadline.pace.note(now - last)
        last = now
        if can_hold and not all(kept.finished) and deadline.is_near:
            break
    return rows
