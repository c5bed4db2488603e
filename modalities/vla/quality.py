"""Quality of policies: success on paired episodes, action errors, and latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import comb, sqrt
from statistics import fmean
from typing import Any

from mmspec.bench.compare import PLAIN
from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.step_stats import ActionStep, percentile
from mmspec.modality import Quality, RunResult, RunResults

Z = 1.959964  # of 95 %


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95 % score interval of a rate (Wilson 1927)."""
    rate, shrink = successes / count, 1 + Z * Z / count
    middle = (rate + Z * Z / (2 * count)) / shrink
    half = Z / shrink * sqrt(rate * (1 - rate) / count + Z * Z / (4 * count * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def mcnemar(mine: Sequence[bool], other: Sequence[bool]) -> dict[str, float]:
    """Episodes that only one of the two solved, and the exact two-sided p (McNemar 1947)."""
    pairs = list(zip(mine, other, strict=True))
    ours, theirs = pairs.count((True, False)), pairs.count((False, True))
    total = ours + theirs
    tail = sum(comb(total, k) for k in range(min(ours, theirs) + 1)) / 2**total
    return {"only this": ours, "only plain": theirs, "p": min(2 * tail, 1.0)}


def extras(mine: Sequence[RunResult], every: RunResults) -> Mapping[str, Any]:
    """Success and latency of a runner over its episodes; empty for single requests."""
    rollouts = _list_rollouts(mine)
    if not rollouts:
        return {}
    steps = [step for one in rollouts for step in one.steps]
    solved = [one.is_success for one in rollouts]
    low, high = wilson(sum(solved), len(solved))
    made: dict[str, Any] = {
        "success": sum(solved) / len(solved),
        "success, 95 %": {"low": low, "high": high},
        "steps": fmean(len(one.actions) for one in rollouts),
        **latency_figures(steps, rollouts),
    }
    if PLAIN in every:
        plain = [one.is_success for one in _list_rollouts(every[PLAIN])]
        made["McNemar"] = mcnemar(solved, plain)
    return made


def latency_figures(steps: Sequence[ActionStep], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Rounds, control frequency, latency, and jitter within episodes."""
    latencies = [one.latency_ms for one in steps]
    shakes = [
        abs(now.latency_ms - then.latency_ms)
        for one in rollouts
        for then, now in pairwise(one.steps)
    ]
    made: dict[str, Any] = {
        "rounds per action": fmean(one.rounds for one in steps),
        "control, Hz": 1e3 / fmean(latencies),
        "latency, ms": {f"p{share}": percentile(latencies, share) for share in (50, 95, 99)},
    }
    if shakes:
        made["jitter, ms"] = {f"p{share}": percentile(shakes, share) for share in (50, 99)}
    held, late = sum(one.held for one in steps), sum(one.is_late for one in steps)
    if held or late:
        made |= {"components held": held, "deadlines missed": late}
    return made


def _list_rollouts(results: Sequence[RunResult]) -> list[Rollout]:
    """The episodes of results, also of those side by side; none of single requests."""
    return [one for result in results for one in result.output or ()]


def _select_evaluated(answers: Sequence[RunResult]) -> list[ActionStep]:
    steps = [step for one in _list_rollouts(answers) for step in one.steps]
    return [step for step in steps if step.action_error is not None]


def _bins_off(answers: Sequence[RunResult], every: RunResults) -> list[tuple[float, float]]:
    return [(fmean(step.token_distance or (0,)), 1.0) for step in _select_evaluated(answers)]


def _error(answers: Sequence[RunResult], every: RunResults) -> list[tuple[float, float]]:
    return [(fmean(step.action_error or (0.0,)), 1.0) for step in _select_evaluated(answers)]


def _largest(answers: Sequence[RunResult], every: RunResults) -> list[tuple[float, float]]:
    steps = _select_evaluated(answers)
    return [(max(max(step.action_error or (0.0,)) for step in steps), 1.0)] if steps else []


# relative to the target's own action for the same image; in the units of each component
ERRORS = (
    Quality("action error, bins", _bins_off),
    Quality("action error", _error),
    Quality("largest action error", _largest),
)
