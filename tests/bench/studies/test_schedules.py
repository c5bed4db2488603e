"""The simulated clock adds up to the rounds of real runs, and to a clock that ticks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import mmspec
from mmspec.bench.studies.overlap import ComponentCosts, overlapped_seconds, sequential_seconds
from mmspec.bench.studies.schedules import (
    asynchronous_time,
    compare_schedules,
    read_agreement,
    sequential_time,
    windows_time,
)
from mmspec.draft import Round
from tests import toys
from tests.partners import noisy

ROOM = 33
COSTS = ComponentCosts(draft=1.0, step=5.0, more=0.25)
PATTERNS: list[list[bool]] = [
    (np.random.default_rng(seed).random(40) < rate).tolist()
    for seed in range(3)
    for rate in (0.3, 0.8, 0.95)
]


def rounds_of(recipe: str, length: int) -> list[Round]:
    seen: list[Round] = []
    fast = mmspec.accelerate(
        toys.model("llama"), recipe, drafter=noisy("llama", 0.02), length=length
    )
    fast.generate(**toys.inputs("llama"), max_new_tokens=ROOM, seed=1, on_round=seen.append)
    return seen


def test_times_are_those_of_real_rounds() -> None:
    seen = rounds_of("pearl", 3)
    agrees = read_agreement(seen)
    assert len(agrees) == ROOM - 1
    assert 0 < sum(agrees) < ROOM - 2
    assert windows_time(agrees, COSTS, 3) == pytest.approx(overlapped_seconds(seen, COSTS, 3))
    for length in (2, 5):
        waits = sequential_seconds(rounds_of("coupled", length), COSTS)
        assert sequential_time(agrees, COSTS, length) == pytest.approx(waits)
    wrong = [True, *agrees[:-1]]  # each token's agreement at the one after
    assert windows_time(wrong, COSTS, 3) != pytest.approx(overlapped_seconds(seen, COSTS, 3))


def ticking(agrees: Sequence[bool], draft: int, stage: int, stages: int, block: int) -> int:
    """The same as `asynchronous_time`, tick by tick; blocks of any size take the same time."""
    now = place = 0
    while True:
        start, sent, flying = now, -1, list[list[int]]()  # ticks in the target, tokens known after
        while True:
            if all(age >= stage for age, _ in flying):
                drafted = place + (now - start) // draft
                count = min(block, min(drafted, len(agrees) - 1) - sent)
                if sent < 0:
                    sent, count = place, 1
                    flying.append([0, place + 1])
                elif count > 0:
                    sent += count
                    flying.append([0, sent + 1])
            now += 1
            flying = [[age + 1, known] for age, known in flying]
            if flying and flying[0][0] == stage * stages:
                known = flying.pop(0)[1]
                right = next((at for at in range(place, known) if not agrees[at]), known)
                if known >= len(agrees) and right >= len(agrees) - 1:
                    return now
                if right < known or place + (now - start) // draft < known:
                    place = min(known, right + 1)
                    break


@pytest.mark.parametrize(
    ("draft", "stage", "stages", "block"),
    [(1, 5, 1, 4), (1, 1, 4, 1), (1, 2, 3, 2), (2, 3, 2, 3), (7, 1, 3, 2), (3, 8, 1, 40)],
)
def test_events_are_those_of_a_ticking_clock(
    draft: int, stage: int, stages: int, block: int
) -> None:
    costs = ComponentCosts(draft=float(draft), step=float(stage * stages), more=0.0)
    for agrees in PATTERNS:
        found = asynchronous_time(agrees, costs, block, stages)
        assert found == pytest.approx(ticking(agrees, draft, stage, stages, block))


def test_limits_of_the_schedules() -> None:
    never, always = [False] * 12, [True] * 41
    for stages in (1, 4):
        assert asynchronous_time(never, COSTS, 4, stages) == 12 * COSTS.step
    flat = ComponentCosts(draft=1.0, step=4.0, more=0.0)
    assert asynchronous_time(always, flat, 8) == 4 + 4 * 10  # four tokens are drafted a forward
    assert asynchronous_time(always, flat, 1, stages=4) == 4 + 40  # one leaves the pipeline a tick
    # refused blocks that run to their end are in the way of the token that follows
    slow = ComponentCosts(draft=1.3, step=4.0, more=0.0)
    assert asynchronous_time(never, slow, 1, 4, is_cancelled=False) > 12 * slow.step
    assert asynchronous_time(never, slow, 1, 4) == pytest.approx(12 * slow.step)
    assert windows_time([False] * 4, slow, 3) == sequential_time([False] * 4, slow, 0) == 16
    assert sequential_time(always, flat, 4) == pytest.approx(41 / 5 * 8, abs=8)


def test_the_best_length_of_each_schedule() -> None:
    one, four = (compare_schedules(PATTERNS, ratio=8.0, stages=stages) for stages in (1, 4))
    assert one.pipeline == one.buffer == four.buffer
    assert (one.sequential, one.windows) == (four.sequential, four.windows)
    assert four.pipeline > four.buffer > four.windows > four.sequential > 1
    assert four.pipeline >= four.uncancelled
