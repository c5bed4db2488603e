"""Token for token: greedy against `generate()`, seeded sampling against plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mmspec.api import Accelerated, accelerate
from mmspec.bench.players import Answer, Generate, Inputs, Speculative
from mmspec.bench.progress import Progress, silent


@dataclass(frozen=True)
class Equal:
    """How many answers were the same, and the first that was not."""

    same: int
    total: int
    first_difference: str = ""

    @property
    def passed(self) -> bool:
        return self.same == self.total


class Side(Protocol):
    """Answers requests."""

    def answer(self, inputs: Inputs, room: int) -> Answer: ...


def greedy_equality(
    fast: Accelerated, requests: Sequence[Inputs], room: int, progress: Progress = silent
) -> Equal:
    """Greedy answers against `model.generate()`."""
    settings = {"do_sample": False}
    pairs = [(Generate(fast.model, settings), Speculative(fast, settings))] * len(requests)
    return compare("greedy", pairs, requests, room, progress)


def seeded_equality(
    fast: Accelerated,
    requests: Sequence[Inputs],
    room: int,
    seeds: int,
    progress: Progress = silent,
) -> Equal:
    """Samples at temperature 1 against plain decoding with the same seed."""
    settings: dict[str, Any] = {"do_sample": True, "temperature": 1.0}
    plain = accelerate(fast.model, "plain")
    pairs = [
        (Speculative(plain, settings, seed=seed), Speculative(fast, settings, seed=seed))
        for seed in range(seeds)
    ]
    asked = [requests[seed % len(requests)] for seed in range(seeds)]
    return compare("seeds", pairs, asked, room, progress)


def compare(
    stage: str,
    pairs: Sequence[tuple[Side, Side]],
    requests: Sequence[Inputs],
    room: int,
    progress: Progress,
) -> Equal:
    """Both sides of every pair on its request."""
    same, difference = 0, ""
    for index, ((wanted, player), inputs) in enumerate(zip(pairs, requests, strict=True)):
        right = wanted.answer(inputs, room).tokens
        mine = player.answer(inputs, room).tokens
        same += right == mine
        if right != mine and not difference:
            difference = f"case {index}: {_where(right, mine)}"
        progress(stage, index + 1, len(pairs))
    return Equal(same, len(pairs), difference)


def _where(right: list[list[int]], mine: list[list[int]]) -> str:
    for row, (a, b) in enumerate(zip(right, mine, strict=True)):
        for place in range(max(len(a), len(b))):
            if a[place : place + 1] != b[place : place + 1]:
                wanted, found = a[place : place + 3], b[place : place + 3]
                return f"row {row}, token {place}: {wanted} became {found}"
    return "nowhere"
