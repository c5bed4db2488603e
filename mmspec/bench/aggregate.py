"""One set of statistics out of many requests'."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from mmspec.stats import Stats


def steps(stats: Sequence[Stats]) -> int:
    return sum(one.num_spec_steps for one in stats)


def mean_acceptance_length(stats: Sequence[Stats]) -> float:
    accepted = sum(one.num_accepted_draft_tokens for one in stats)
    return 1 + accepted / max(steps(stats), 1)


def histogram(stats: Sequence[Stats]) -> list[int]:
    """Entry j: steps that kept exactly j draft tokens."""
    columns = zip_longest(*(one.acceptance_histogram for one in stats), fillvalue=0)
    return [sum(column) for column in columns]


def tokens_per_target_call(stats: Sequence[Stats]) -> float:
    calls = [one.num_spec_steps + one.speculation_off_steps for one in stats]
    tokens = sum(one.tokens_per_target_call * n for one, n in zip(stats, calls, strict=True))
    return tokens / max(sum(calls), 1)


def shares(stats: Sequence[Stats]) -> dict[str, float]:
    """Where the time went: prefill, draft, verify, host; together 1."""
    total = sum(one.total_seconds for one in stats) or 1.0
    parts = ("prefill", "draft", "verify", "host")
    return {part: sum(getattr(one, f"{part}_seconds") for one in stats) / total for part in parts}


def over_accepted_mass(stats: Sequence[Stats]) -> float | None:
    """Mean per token; None where nothing was measured."""
    told = [one for one in stats if one.over_accepted_mass is not None]
    tokens = sum(one.num_new_tokens for one in told)
    mass = sum((one.over_accepted_mass or 0.0) * one.num_new_tokens for one in told)
    return mass / max(tokens, 1) if told else None
