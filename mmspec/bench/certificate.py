"""What `mmspec certify` reports: checks, and the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mmspec.recipe import Recipe

ALPHA = 1e-3  # most chance of refuting a right recipe, all frequency tests together
TOKENS = "total variation of the first two tokens"

Outcome = Literal["passed", "refuted", "lossy", "skipped"]
Verdict = Literal["exact", "lossy", "refuted", "untested"]


@dataclass(frozen=True)
class Check:
    """One way of testing the claim, and what it found."""

    name: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Certificate:
    """What `mmspec certify` reports."""

    recipe: str
    claims_exact: bool
    verdict: Verdict
    checks: list[Check]
    distance: float | None  # from the target, where it was measured
    false_alarm_rate: float = ALPHA
    distance_of: str = TOKENS  # what the distance is

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


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
