"""Value for value: two contestants that must answer alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.bench.progress import Progress
from mmspec.modality import Runner


@dataclass(frozen=True)
class Equal:
    """How many answers were the same, and the first that was not."""

    same: int
    total: int
    first_difference: str = ""
    fallback: str | None = None  # why the drafter was retired: what follows is plain decoding

    @property
    def passed(self) -> bool:
        return self.same == self.total


def equal(
    stage: str,
    wanted: Runner,
    found: Runner,
    cases: Sequence[tuple[Mapping[str, Any], int]],
    progress: Progress,
) -> Equal:
    """Both on every request, with its seed, up to where a drafter fails."""
    same, difference = 0, ""
    for index, (request, seed) in enumerate(cases):
        right = wanted.run(request, seed).values
        answer = found.run(request, seed)
        mine = answer.values
        same += right == mine
        if right != mine and not difference:
            difference = f"case {index}: {_where(right, mine)}"
        if answer.stats is not None and answer.stats.fallback is not None:
            return Equal(same, len(cases), difference, answer.stats.fallback)
        progress(stage, index + 1, len(cases))
    return Equal(same, len(cases), difference)


def _where(right: Sequence[Sequence[Any]], mine: Sequence[Sequence[Any]]) -> str:
    for row, (a, b) in enumerate(zip(right, mine, strict=True)):
        for place in range(max(len(a), len(b))):
            if a[place : place + 1] != b[place : place + 1]:
                wanted, found = a[place : place + 3], b[place : place + 3]
                return f"row {row}, token {place}: {wanted} became {found}"
    return "nowhere"
