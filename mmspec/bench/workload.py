"""Building blocks of workloads: batches of requests, draft models of peers, quality measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mmspec.modality import Quality, RunResult, RunResults

T = TypeVar("T")
Scored = Sequence[tuple[int, int]]  # per item: correct facts, all facts


def group_batches(items: Sequence[T], batch: int) -> list[list[T]]:
    """Split into whole batches; the rest is dropped."""
    return [list(items[at : at + batch]) for at in range(0, len(items) - batch + 1, batch)]


def repeat_prompts(prompts: Sequence[str], batch: int) -> list[list[str]]:
    """Split prompts into whole batches; the last one is filled up with the first prompts."""
    count = -(-len(prompts) // batch) * batch
    return group_batches([prompts[index % len(prompts)] for index in range(count)], batch)


def can_generate(drafter: Any) -> bool:
    """Whether a draft model decodes on its own, as assisted generation needs it; heads do not."""
    return callable(getattr(drafter, "generate", None))


def pool_scores(scored: Scored) -> list[tuple[float, float]]:
    """Return (share of correct facts, number of facts) of every item."""
    return [(correct / max(count, 1), count) for correct, count in scored]


def fact_accuracy(judge: Callable[[Sequence[RunResult]], Scored]) -> Quality:
    """Make the quality measure "share of correct facts"."""
    return Quality("facts right", lambda results, others: pool_scores(judge(results)))


def agreement(base: str) -> Quality:
    """Make the quality measure "share of the baseline's tokens at the same position"."""

    def values(results: Sequence[RunResult], others: RunResults) -> list[tuple[float, float]]:
        if base not in others:
            return []
        both = zip(results, others[base], strict=True)
        return pool_scores([_count_agreeing(own.values, other.values) for own, other in both])

    return Quality(f"agreement with {base}", values)


def _count_agreeing(own: Sequence[Sequence[int]], base: Sequence[Sequence[int]]) -> tuple[int, int]:
    pairs = list(zip(own, base, strict=True))
    same = sum(a == b for row, other in pairs for a, b in zip(row, other, strict=False))
    return same, sum(max(len(row), len(other)) for row, other in pairs)
