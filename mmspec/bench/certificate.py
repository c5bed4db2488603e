"""The report of `mmspec certify`: checks, and the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmspec.accelerated import Accelerated
from mmspec.bench.reporting import Progress, Report, silent
from mmspec.recipe import Recipe

ALPHA = 1e-3  # false-alarm rate of all frequency tests together

Outcome = Literal["passed", "refuted", "lossy", "skipped"]
Verdict = Literal["exact", "lossy", "refuted", "untested"]


@dataclass(frozen=True)
class Trial:
    """Inputs of a certificate.

    `requests` are arguments of the default call of `fast`; without both, tiny models are tested.
    """

    fast: Accelerated | None = None
    requests: Sequence[Mapping[str, Any]] = ()
    seeds: int = 50
    samples: int = 6000
    progress: Progress = silent


@dataclass(frozen=True)
class Check:
    """Result of one test."""

    name: str
    outcome: Outcome
    detail: str
    distance: float | None = None  # from the target's distribution, where measured
    distance_of: str = ""  # what was measured


@dataclass(frozen=True)
class Certificate(Report):
    """The report of `mmspec certify`."""

    recipe: str
    modality: str
    claims_exact: bool
    verdict: Verdict
    checks: list[Check]
    distance: float | None  # the largest measured one
    distance_of: str
    false_alarm_rate: float = ALPHA

    @classmethod
    def of(cls, plan: Recipe, modality: str, checks: Sequence[Check]) -> Certificate:
        """Make the certificate of a bound recipe from its checks."""
        measured = [check for check in checks if check.distance is not None]
        worst = max(measured, key=lambda check: check.distance or 0.0, default=None)
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
    """Return the outcome of a test, whose failure refutes exact recipes only."""
    if passed:
        return "passed"
    return "refuted" if plan.exact else "lossy"


def verdict(plan: Recipe, checks: Sequence[Check]) -> Verdict:
    """Combine the outcomes of all checks."""
    outcomes = {check.outcome for check in checks}
    if "refuted" in outcomes:
        return "refuted"
    if not plan.exact:
        return "lossy"
    return "exact" if "passed" in outcomes else "untested"
