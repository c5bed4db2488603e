"""Statistics of control steps and episodes.

*Latency* is the time from a request to its action. *Jitter* is the absolute difference of the
latencies of consecutive steps.
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
    """One prediction for one robot."""

    index: int  # of the request in its episode
    tokens: tuple[int, ...]  # verified, or accepted by a gate
    sources: tuple[str, ...]  # of each component: predicted by the target, drafted and accepted,
    # accepted by a gate unverified, or held
    rounds: int
    target_calls: int  # prefill aside
    accepted: tuple[int, ...]  # accepted draft tokens, of each round with a draft
    first_error: int | None  # the first rejected component (AFEP of KERV)
    unverified: int  # components that a gate accepted without a target call
    held: int  # components of the previous action, because the deadline was near
    latency_ms: float
    is_late: bool  # whether the deadline was missed
    token_distance: tuple[int, ...] | None = None  # to the target's own greedy tokens, in bins
    action_error: tuple[float, ...] | None = None  # to its own greedy action, in the robot's units

    @property
    def acceptance_length(self) -> float:
        """Tokens per round with a draft, the target's own included; 1 without drafts."""
        return 1 + fmean(self.accepted) if self.accepted else 1.0


@dataclass(frozen=True)
class ActionStats(Stats):
    """Statistics of one request, or of an episode.

    Counts of `Stats` and the first eight fields here are those of the request or episode.
    Percentiles are over the steps since the robot's reset (of several, the first robot);
    `token_distance` and `action_error_*` are set in evaluation mode.
    """

    steps: int = 0  # requests, of all robots
    rounds_per_action: float = 0.0
    calls_per_action: float = 0.0  # of the target per request, prefill aside; robots share calls
    first_errors: tuple[int | None, ...] = ()  # of each step
    held_dims: int = 0  # components held because the deadline was near
    deadline_ms: float | None = None
    deadlines_missed: int = 0
    latency_ms: float = 0.0  # median over these requests
    latency_p50_ms: float = 0.0
    latency_p95_ms: float = 0.0
    latency_p99_ms: float = 0.0
    jitter_p50_ms: float | None = None  # None = fewer than two steps
    jitter_p99_ms: float | None = None
    control_hz: float = 0.0  # requests per second of latency
    token_distance: tuple[float, ...] | None = None  # per component, mean
    action_error_mean: tuple[float, ...] | None = None  # per component, in the robot's units
    action_error_max: tuple[float, ...] | None = None


def summarize_steps(
    stats: Stats,
    steps: Sequence[ActionStep],
    num_requests: int,
    since_reset: Sequence[ActionStep],
    deadline_ms: float | None,
) -> ActionStats:
    """Statistics of `steps`, of so many batched requests, added to those of the loop."""
    base: dict[str, Any] = {one.name: getattr(stats, one.name) for one in fields(Stats)}
    latencies = [one.latency_ms for one in since_reset]
    shakes = [abs(now - then) for then, now in pairwise(latencies)]
    held = sum(one.held for one in steps)
    return ActionStats(
        **{**base, "exact": stats.exact and not held},
        steps=len(steps),
        rounds_per_action=fmean(one.rounds for one in steps),
        calls_per_action=stats.target_calls / num_requests,
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
    """The smallest value that `share` percent of the values do not exceed (nearest rank)."""
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
