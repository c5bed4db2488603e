"""What workloads of any modality are made of: requests in batches, and qualities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from mmspec.modality import Quality, RunResult, RunResults

T = TypeVar("T")
Scored = Sequence[tuple[int, int]]  # of every item: facts right, facts asked


def grouped(items: Sequence[T], batch: int) -> list[list[T]]:
    """Whole batches; what is left over is left out."""
    return [list(items[at : at + batch]) for at in range(0, len(items) - batch + 1, batch)]


def repeated(prompts: Sequence[str], batch: int) -> list[list[str]]:
    """All that a user typed in whole batches, the last one filled up from the beginning."""
    count = -(-len(prompts) // batch) * batch
    return grouped([prompts[index % len(prompts)] for index in range(count)], batch)


def pooled(scored: Scored) -> list[tuple[float, float]]:
    """Of every item the share that is right, weighted by what was asked."""
    return [(right / max(asked, 1), asked) for right, asked in scored]


def facts_right(judge: Callable[[Sequence[RunResult]], Scored]) -> Quality:
    """The share of facts that are right, of all that were asked."""
    return Quality("facts right", lambda answers, others: pooled(judge(answers)))


def agreement(base: str) -> Quality:
    """Share of the baseline's tokens that come out at the same place."""

    def values(answers: Sequence[RunResult], others: RunResults) -> list[tuple[float, float]]:
        if base not in others:
            return []
        both = zip(answers, others[base], strict=True)
        return pooled([_agreeing(mine.values, wanted.values) for mine, wanted in both])

    return Quality(f"agreement with {base}", values)


def _agreeing(mine: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> tuple[int, int]:
    pairs = list(zip(mine, wanted, strict=True))
    same = sum(a == b for row, other in pairs for a, b in zip(row, other, strict=False))
    return same, sum(max(len(row), len(other)) for row, other in pairs)


def random_prompt(
    vocabulary: int, length: int, device: torch.device, batch: int = 1, seed: int = 0
) -> dict[str, Any]:
    """A prompt of random token ids, for models that need no meaning."""
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, vocabulary, (batch, length), generator=noise).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
