"""What a policy did at each step of control, and what that says of the whole.

*Latency* is the time from a question to its action. *Jitter* is how much the latency of a step
differs from that of the step before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import ceil
from statistics import fmean
from typing import Any

from mmspec.stats import Stats

TARGET, DRAFTED, UNVERIFIED, HELD = "target", "drafted", "unverified", "held"


@dataclass(frozen=True)
class ActionStep:
    """One robot's answer to one question."""

    index: int  # of the question in its episode
    tokens: tuple[int, ...]  # verified ones, or kept by a gate
    sources: tuple[str, ...]  # of each component: said by the target, drafted and kept, kept by a
    # gate unverified, or held
    rounds: int
    target_calls: int  # prefill aside
    accepted: tuple[int, ...]  # drafted tokens kept, of each round with a draft
    first_error: int | None  # the first component that the target had to say itself (AFEP of KERV)
    unverified: int  # components that a gate kept without asking the target
    held: int  # components of the action before, because the deadline was near
    latency_ms: float
    is_late: bool  # whether it came behind the deadline all the same
    token_distance: tuple[int, ...] | None = None  # to the target's own greedy tokens, in bins
    action_error: tuple[float, ...] | None = None  # to its own greedy action, in the robot's units

    @property
    def acceptance_length(self) -> float:
        """Tokens per round with a draft, the target's own included; 1 where nothing was drafted."""
        return 1 + fmean(self.accepted) if self.accepted else 1.0


@dataclass(frozen=True)
class ActionStats(Stats):
    """Statistics of one question, or of an episode.

    Counts of `Stats` are those of the question or episode, and so are the first eight fields here.
    Percentiles are over the steps since the robot's reset (the first robot's, of several);
    `token_distance` and `action_error_*` are there in evaluation mode.
    """

    steps: int = 0  # questions, of all robots
    rounds_per_action: float = 0.0
    calls_per_action: float = 0.0  # of the target per question, prefill aside; robots share calls
    first_errors: tuple[int | None, ...] = ()  # of each step
    held_dims: int = 0  # components held because the deadline was near
    deadline_ms: float | None = None
    deadlines_missed: int = 0
    latency_ms: float = 0.0  # median over these questions
    latency_p50_ms: float = 0.0
    latency_p95_ms: float = 0.0
    latency_p99_ms: float = 0.0
    jitter_p50_ms: float | None = None  # None = fewer than two steps
    jitter_p99_ms: float | None = None
    control_hz: float = 0.0  # questions answered per second of latency
    token_distance: tuple[float, ...] | None = None  # per component, mean
    action_error_mean: tuple[float, ...] | None = None  # per component, in the robot's units
    action_error_max: tuple[float, ...] | None = None


def summed_up(
    stats: Stats,
    steps: Sequence[ActionStep],
    questions: int,
    since_reset: Sequence[ActionStep],
    deadline_ms: float | None,
) -> ActionStats:
    """Statistics of `steps`, which answered so many `questions`, beside those of the loop."""
    base: dict[str, Any] = {one.name: getattr(stats, one.name) for one in fields(Stats)}
    latencies = [one.latency_ms for one in since_reset]
    shakes = [abs(now - then) for then, now in pairwise(latencies)]
    held = sum(one.held for one in steps)
    return ActionStats(
        **{**base, "exact": stats.exact and not held},
        steps=len(steps),
        rounds_per_action=fmean(one.rounds for one in steps),
        calls_per_action=stats.target_calls / questions,
        first_errors=tuple(one.first_error for one in steps),
        held_dims=held,
        deadline_ms=deadline_ms,
        deadlines_missed=sum(one.is_late for one in steps),
        latency_ms=percentile([one.latency_ms for one in steps], 50),
        latency_p50_ms=percentile(latencies, 50),
        latency_p95_ms=percentile(latencies, 95),
        latency_p99_ms=percentile(latencies, 99),
        jitter_p50_ms=percentile(shakes, 50) if shakes else None,
        jitter_p99_ms=percentile(shakes, 99) if shakes else None,
        control_hz=1e3 / fmean(one.latency_ms for one in steps),
        **_errors(steps),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` percent of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(ceil(share / 100 * len(ordered)) - 1, 0)]


def _errors(steps: Sequence[ActionStep]) -> dict[str, Any]:
    distances = [one.token_distance for one in steps if one.token_distance is not None]
    errors = [one.action_error for one in steps if one.action_error is not None]
    if not distances or not errors:
        return {}
    return {
        "token_distance": tuple(map(fmean, zip(*distances, strict=True))),
        "action_error_mean": tuple(map(fmean, zip(*errors, strict=True))),
        "action_error_max": tuple(map(max, zip(*errors, strict=True))),
    }
