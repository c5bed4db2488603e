"""What `mmspec certify` reports: checks, and the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmspec.api import Accelerated
from mmspec.bench.progress import Progress, silent
from mmspec.bench.report import Report
from mmspec.recipe import Recipe

ALPHA = 1e-3  # most chance of refuting a right recipe, all frequency tests together

Outcome = Literal["passed", "refuted", "lossy", "skipped"]
Verdict = Literal["exact", "lossy", "refuted", "untested"]


@dataclass(frozen=True)
class Trial:
    """What a certificate is made from, and how much is tried.

    `requests` are arguments of the customary call of `fast`; without both, tiny models are asked.
    """

    fast: Accelerated | None = None
    requests: Sequence[Mapping[str, Any]] = ()
    seeds: int = 50
    samples: int = 6000
    progress: Progress = silent


@dataclass(frozen=True)
class Check:
    """One way of testing the claim, and what it found."""

    name: str
    outcome: Outcome
    detail: str
    distance: float | None = None  # from the target, where it was measured
    distance_of: str = ""  # what the distance is


@dataclass(frozen=True)
class Certificate(Report):
    """What `mmspec certify` reports."""

    recipe: str
    modality: str
    claims_exact: bool
    verdict: Verdict
    checks: list[Check]
    distance: float | None  # the largest that was measured
    distance_of: str
    false_alarm_rate: float = ALPHA

    @classmethod
    def of(cls, plan: Recipe, modality: str, checks: Sequence[Check]) -> Certificate:
        """Of a recipe as it was bound."""
        told = [check for check in checks if check.distance is not None]
        worst = max(told, key=lambda check: check.distance or 0.0, default=None)
        return cls(
            recipe=plan.name or "custom",
            modality=modality,
            claims_exact=plan.exact,
            verdict=verdict(plan, checks),
            checks=list(checks),
            distance=None if worst is None else worst.distance,
            distance_of="" if worst is None else worst.distance_of,
        )


def outcome(plan: Recipe, passed: bool) -> Outcome:
    """A failed test refutes a claim; where nothing was claimed it shows the loss."""
    if passed:
        return "passed"
    return "refuted" if plan.exact else "lossy"


def verdict(plan: Recipe, checks: Sequence[Check]) -> Verdict:
    """What all checks say together."""
    outcomes = {check.outcome for check in checks}
    if "refuted" in outcomes:
        return "refuted"
    if not plan.exact:
        return "lossy"
    return "exact" if "passed" in outcomes else "untested"
