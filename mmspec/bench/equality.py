"""Compare the outputs of two runners, value for value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.bench.reporting import Progress
from mmspec.modality import Runner


@dataclass(frozen=True)
class EqualityResult:
    """Number of equal outputs, and the first difference."""

    same: int
    total: int
    first_difference: str = ""
    fallback: str | None = None  # why the drafter was disabled; plain decoding follows

    @property
    def is_equal(self) -> bool:
        return self.same == self.total


def compare_runners(
    stage: str,
    reference: Runner,
    runner: Runner,
    cases: Sequence[tuple[Mapping[str, Any], int]],
    progress: Progress,
) -> EqualityResult:
    """Run both on every (request, seed); stop where a drafter fails."""
    same, difference = 0, ""
    for index, (request, seed) in enumerate(cases):
        expected = reference.run(request, seed).values
        result = runner.run(request, seed)
        values = result.values
        same += expected == values
        if expected != values and not difference:
            difference = f"case {index}: {_first_difference(expected, values)}"
        if result.stats is not None and result.stats.fallback is not None:
            return EqualityResult(same, len(cases), difference, result.stats.fallback)
        progress(stage, index + 1, len(cases))
    return EqualityResult(same, len(cases), difference)


def _first_difference(expected: Sequence[Sequence[Any]], values: Sequence[Sequence[Any]]) -> str:
    for row, (a, b) in enumerate(zip(expected, values, strict=True)):
        for position in range(max(len(a), len(b))):
            if a[position : position + 1] != b[position : position + 1]:
                left, right = a[position : position + 3], b[position : position + 3]
                return f"row {row}, token {position}: {left} became {right}"
    return "nowhere"
