"""Draft lengths: budgets, predicates on distributions, and adaptation to synthetic rounds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Round, Verdict
from mmspec.drafters.lengths.goodput import Auto, Goodput, parse
from mmspec.drafters.lengths.length import (
    AdaptiveEntropy,
    Confidence,
    Entropy,
    Fixed,
    Heuristic,
    Length,
    max_useful_length,
)
from tests.drafters.driving import context

E1 = torch.tensor([0.5, 0.3, 0.2])  # entropy 1.029653 nats
LENGTHS: list[Length] = [
    Fixed(4),
    Heuristic(),
    Entropy(),
    AdaptiveEntropy(),
    Confidence(),
    Auto(),
]


def turn(
    accepted: tuple[int, ...],
    depth: int,
    seconds: dict[str, float] | None = None,
    finished: tuple[bool, ...] | None = None,
) -> Round:
    """A round in which every row drafted a chain of `depth`."""
    rows = len(accepted)
    ends = torch.tensor(accepted)
    return Round(
        index=1,
        drafted=(depth,) * rows,
        accepted=accepted,
        path=tuple(tuple(range(count)) for count in accepted),
        takes_next=(True,) * rows,
        tokens=tuple((0,) * (count + 1) for count in accepted),
        finished=finished or (False,) * rows,
        verdict=Verdict(ends[:, None], ends, ends),
        depth=depth,
        seconds=seconds or {},
    )


@pytest.mark.parametrize("length", LENGTHS, ids=repr)
def test_no_budget_beyond_what_can_be_kept(length: Length) -> None:
    now = context([1, 2], [1, 2], room=5)
    state = length.begin()
    assert 1 <= length.budget(state, now) <= min(4, length.max_length)
    now.history[0].extend([3, 3, 3, 3])  # one token left in row 0, three in row 1
    now.history[1].extend([3, 3])
    assert length.budget(state, now) == 2
    assert length.budget(state, replace(now, finished=(False, True))) == 0
    assert max_useful_length(replace(now, finished=(True, True))) == 0


@pytest.mark.parametrize("length", LENGTHS, ids=repr)
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_sure_rows_draft_on(length: Length, shape: tuple[int, ...]) -> None:
    sure, unsure = torch.tensor([9.0, -9.0, -torch.inf]), torch.zeros(3)
    distribution = Categorical(torch.stack([sure, unsure]).view(*shape, 3))
    draft_mask = length.draft_mask(length.begin(), distribution)
    if draft_mask is None:
        assert isinstance(length, Fixed | Heuristic | Auto)
    else:
        assert draft_mask.tolist() == [True, False]
    hard = length.draft_mask(
        length.begin(), replace(distribution, hard=True)
    )  # greedy drafting is judged alike
    assert (draft_mask is None) == (hard is None)
    assert draft_mask is None or hard is None or draft_mask.equal(hard)


def test_what_reaches_a_bound_drafts_on() -> None:
    sure = Categorical(torch.tensor([[0.0, -torch.inf]]))
    even = Categorical(torch.zeros(1, 2))
    assert Entropy(h=0.0).draft_mask(None, sure).tolist() == [True]
    assert Confidence(threshold=0.5).draft_mask(None, even).tolist() == [True]


def test_entropy_is_in_nats() -> None:
    distribution = Categorical.from_weights(E1[None])  # sqrt(0.15 H) = 0.393
    assert Entropy(h=0.394).draft_mask(None, distribution).tolist() == [True]
    assert Entropy(h=0.392).draft_mask(None, distribution).tolist() == [False]
    # the form of AdaEDL: 1 - sqrt(0.2 H) = 0.546 against lambda = 1 - h
    for level, draft_mask in ((0.545, True), (0.547, False)):
        adaptive = AdaptiveEntropy(h=1 - level)
        assert adaptive.draft_mask(adaptive.begin(), distribution).tolist() == [draft_mask]


def test_confidence_asks_the_best_token() -> None:
    distribution = Categorical.from_weights(E1[None])
    assert Confidence(0.5 - 1e-6).draft_mask(None, distribution).tolist() == [True]
    assert Confidence(0.51).draft_mask(None, distribution).tolist() == [False]


def test_adaptive_entropy_moves_towards_its_target() -> None:
    length = AdaptiveEntropy(target=0.5)
    lax, strict = length.begin(), length.begin()
    for _ in range(50):
        lax = length.observe(lax, turn((4,), 4))
        strict = length.observe(strict, turn((0,), 4))
    assert lax.h > length.h > strict.h
    for _ in range(50):
        assert length.observe(strict, turn((0,), 0)).h > strict.h  # never shut for good
    for _ in range(3000):
        strict = length.observe(strict, turn((0,), 4))
    assert strict.h == 0


def test_heuristic_goes_up_by_two_and_down_by_one() -> None:
    length = Heuristic(start=5, max_length=8)
    state = length.begin()
    for accepted, depth, expected in ((5, 5, 7), (7, 7, 8), (3, 8, 7), (0, 0, 7), (6, 7, 6)):
        state = length.observe(state, turn((accepted,), depth))
        assert state == expected
    assert length.observe(state, turn((0, 6), 6)) == 8  # one whole row is enough
    assert length.observe(state, turn((2,), 6, finished=(True,))) == 6  # cut short by a stop
    assert length.observe(1, turn((0,), 1)) == 1


def test_a_shorter_draft_that_was_kept_whole_is_no_refusal() -> None:
    """In a batch some rows draft less than others."""
    uneven = replace(turn((0, 1), 3), drafted=(3, 1))
    assert Heuristic(start=5).observe(5, uneven) == 7
    state = Auto().begin()
    Auto().observe(state, uneven)
    assert state.num_tested[:3] == [2, 0, 0]
    assert state.num_accepted[:3] == [1, 0, 0]


def run(length: Auto, rounds: int, play: Callable[[int], Round]) -> tuple[list[int], Goodput]:
    """Let `length` choose for some rounds, with outcomes `play(k)`."""
    state, chosen = length.begin(), []
    now = context([1], room=10**6)
    for _ in range(rounds):
        chosen.append(length.budget(state, now))
        state = length.observe(state, play(chosen[-1]))
    return chosen, state


def world(share: float, draft: float, verify: float, slope: float = 0.0, rows: int = 1) -> Any:
    """Drafted tokens are accepted with probability `share`; noise-free timings."""
    generator = torch.Generator().manual_seed(0)

    def play(depth: int) -> Round:
        hits = torch.rand(rows, depth, generator=generator) < share
        accepted = tuple(int(row.int().cumprod(0).sum()) if depth else 0 for row in hits)
        seconds = {"draft": draft * depth, "verify": verify + slope * depth, "host": 1e-4}
        return turn(accepted, depth, seconds)

    return play


def test_auto_turns_off_when_drafts_are_worthless(caplog: pytest.LogCaptureFixture) -> None:
    length = Auto()
    with caplog.at_level(logging.WARNING, "mmspec"):
        chosen, state = run(length, 2000, world(0.02, draft=5e-3, verify=1e-2))
    assert sum(k > 0 for k in chosen) < 60
    assert sum(k > 0 for k in chosen[1000:]) <= 2 * 3  # probes have become rare
    assert any(k > 0 for k in chosen[50:])
    assert state.plain_rounds > 1500
    assert state.pauses >= 3
    assert len(caplog.records) == 1
    assert "speculation is slower and is paused" in caplog.text
    with caplog.at_level(logging.WARNING, "mmspec"):  # what was learned outlives the request
        again, _ = run(length, 100, world(0.02, draft=5e-3, verify=1e-2))
    assert sum(k > 0 for k in again) <= 3
    assert len(caplog.records) == 1


def test_auto_grows_when_drafts_are_free_and_accepted() -> None:
    chosen, state = run(Auto(max_length=8), 100, world(0.97, draft=1e-5, verify=1e-2))
    assert chosen[0] == 3
    assert chosen[-1] == 8
    assert chosen[20:].count(8) >= 70
    assert chosen[20:].count(0) <= 2  # the plain rounds it is compared with
    assert state.pauses == 0


@pytest.mark.parametrize(
    ("share", "draft", "slope"),
    [(0.8, 2e-3, 0.0), (0.6, 1e-3, 0.0), (0.9, 1e-3, 1e-3), (0.5, 3e-3, 1e-3)],
)
def test_auto_finds_about_the_best_length(share: float, draft: float, slope: float) -> None:
    verify = 1e-2

    def speed(k: int) -> float:
        cost = verify + (draft + slope) * k + 1e-4
        return sum(share**i for i in range(k + 1)) / cost

    chosen, _ = run(Auto(), 1200, world(share, draft, verify, slope))
    speeds = [speed(k) for k in chosen[200:]]
    assert sum(speeds) / len(speeds) > 0.94 * max(map(speed, range(9)))


def test_auto_turns_on_again_when_drafts_become_good() -> None:
    length = Auto()
    run(length, 60, world(0.0, draft=3e-3, verify=1e-2))
    assert length.statistics.is_paused
    assert max(length.statistics.num_tested) <= 2  # so that a probe counts
    before = length.statistics.pauses
    chosen, state = run(length, 300, world(0.95, draft=3e-3, verify=1e-2))
    assert not state.is_paused
    assert state.pauses == before  # one probe is enough
    assert sum(chosen[-50:]) / 50 > 3


def test_auto_measures_anew_for_another_batch_size() -> None:
    length = Auto()
    run(length, 50, world(0.9, draft=1e-4, verify=1e-2))
    chosen, state = run(length, 50, world(0.9, draft=1e-4, verify=5e-1, rows=4))
    assert state.batch == 4
    assert min(min(times) for times in state.seconds.values()) > 0.4
    assert chosen[-1] > 3


def test_auto_follows_rows_that_join_and_leave() -> None:
    """The number of rows changes between rounds; more of them want shorter drafts."""
    share, length = 0.8, Auto()
    generator = torch.Generator().manual_seed(1)

    def cost(rows: int, depth: int) -> float:
        return 1e-2 + 5e-4 * depth + 2e-4 * rows * (depth + 1) * (rows > 4)

    def speed(rows: int, depth: int) -> float:
        return sum(share**i for i in range(depth + 1)) / cost(rows, depth)

    state, rows, gained = length.begin(), 1, list[float]()
    chosen: dict[int, list[int]] = {rows: [] for rows in (1, 32)}
    for index in range(1500):
        step = int(torch.randint(-4, 5, (), generator=generator))
        rows = min(max(rows + step, 1), 32)
        depth = length.budget(state, context([1], room=10**6))
        hits = torch.rand(rows, depth, generator=generator) < share
        accepted = tuple(int(row.int().cumprod(0).sum()) if depth else 0 for row in hits)
        state = length.observe(state, turn(accepted, depth, {"verify": cost(rows, depth)}))
        if index > 300:
            gained.append(speed(rows, depth) / max(speed(rows, k) for k in range(9)))
            chosen.get(rows, []).append(depth)
    assert sum(gained) / len(gained) > 0.9
    mean = {rows: sum(of) / len(of) for rows, of in chosen.items()}
    assert mean[1] > mean[32] + 1


def test_a_pause_ends_where_far_fewer_rows_run() -> None:
    length = Auto()
    run(length, 60, world(0.3, draft=1e-3, verify=1e-2, slope=1e-2, rows=16))
    assert length.statistics.is_paused
    state = length.statistics
    state.ends_at = state.rounds + 1000
    run(length, 10, world(0.3, draft=1e-4, verify=1e-2, rows=4))
    assert not length.statistics.is_paused


def test_seconds_of_a_length_are_the_usual_ones() -> None:
    """Without the prefill and without outliers; old ones are dropped."""
    length = Auto()
    state = length.begin()
    for spent in (1.0, 9.0, 1.0, 1.0, 7.0):
        length.observe(
            state, turn((2,), 3, {"prefill": 50.0, "draft": spent / 2, "host": spent / 2})
        )
    assert state.seconds.cost(3) == 1
    for _ in range(300):
        length.observe(state, turn((2,), 3, {"verify": 1.0}))
    for _ in range(20):
        length.observe(state, turn((2,), 3, {"verify": 4.0}))
    assert state.seconds.cost(3) == 4


def test_acceptance_of_long_ago_is_forgotten() -> None:
    length = Auto()
    state = length.begin()
    for _ in range(500):
        length.observe(state, turn((3,), 3))
    for _ in range(60):
        length.observe(state, turn((0,), 3))
    assert state.rates()[0] < 0.1


def test_requests_do_not_share_a_state() -> None:
    length = Auto()
    one, two = length.begin(), length.begin()
    length.observe(one, turn((3,), 3, {"verify": 1.0}))
    assert two.rounds == 0
    assert not two.seconds
    assert two.num_tested == [0.0] * 8


@pytest.mark.parametrize(
    ("spec", "policy"),
    [(5, Fixed(5)), (0, Fixed(0)), ("entropy", Entropy()), ("heuristic", Heuristic())],
)
def test_parse(spec: int | str, policy: Length) -> None:
    assert parse(spec) == policy
    assert parse(policy) is policy


def test_parse_names_the_choices() -> None:
    assert isinstance(parse("auto"), Auto)
    for wrong in (-1, True, "fast", 2.5, None, object()):
        with pytest.raises(ValueError, match="'auto', 'heuristic', 'entropy'"):
            parse(wrong)  # type: ignore[arg-type]


def test_lengths_below_one_are_refused() -> None:
    for make in (Heuristic, Entropy, AdaptiveEntropy, Confidence, Auto):
        with pytest.raises(ValueError, match="max_length=0"):
            make(max_length=0)
    with pytest.raises(ValueError, match="max_length=-1"):
        Fixed(-1)
    with pytest.raises(ValueError, match="start=9"):
        Heuristic(start=9, max_length=8)
    with pytest.raises(ValueError, match="target=1"):
        AdaptiveEntropy(target=1)
