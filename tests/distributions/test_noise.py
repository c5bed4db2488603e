"""Keyed noise: uniform, independent wherever keys differ, and equal wherever they agree.

Seeds are fixed, so a test passes or fails for good; a fresh seed would fail a chi-square below with
probability 1e-6.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions import noise as noise_module
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise, Keys, Lane

CPU = torch.device("cpu")
RATE = 1e-6
BINS = 16


def noise(seed: int = 0, batch: int = 4) -> KeyedNoise:
    return KeyedNoise.from_seed(seed, batch, CPU)


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square; counts (n,)."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


def is_uniform(values: Tensor) -> bool:
    counts = torch.histc(values.flatten().double(), BINS, 0, 1).double()
    return p_value(counts, torch.full_like(counts, values.numel() / BINS)) > RATE


def are_independent(left: Tensor, right: Tensor) -> bool:
    """Pairs of uniforms fill the unit square evenly."""
    cells = (left.flatten() * BINS).long() * BINS + (right.flatten() * BINS).long()
    counts = torch.bincount(cells, minlength=BINS * BINS).double()
    return p_value(counts, torch.full_like(counts, left.numel() / BINS**2)) > RATE


COUNT = 20_000
POSITIONS = torch.arange(COUNT)[None]


def along_positions(row: int = 0, seed: int = 0) -> Tensor:
    return noise(seed).shared_keys(POSITIONS).uniform()[row]


def fresh(lane: int, turn: int = 0, row: int = 0) -> Tensor:
    return noise().at_round(turn).fresh_keys(lane, torch.arange(COUNT)).uniform()[row]


STREAMS: dict[str, Callable[[], Tensor]] = {
    "positions": along_positions,
    "rows": lambda: noise(batch=COUNT).shared_keys(torch.tensor([[7]]).expand(COUNT, 1)).uniform(),
    "seeds": lambda: torch.stack(
        [noise(seed, 1).shared_keys(torch.tensor([[7]])).uniform() for seed in range(5000)]
    ),
    "events": lambda: noise(batch=1).shared_keys(torch.tensor([[3]])).uniform(COUNT),
    "draft lane": lambda: fresh(Lane.DRAFT),
    "walk lane": lambda: fresh(Lane.WALK + 3, turn=9),
    "rounds": lambda: torch.stack(
        [
            noise(batch=1).at_round(turn).fresh_keys(Lane.ACCEPT, torch.arange(2)).uniform()
            for turn in range(5000)
        ]
    ),
    "split": lambda: noise(batch=1).shared_keys(POSITIONS).split(2).uniform(),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_uniforms_are_uniform(stream: str) -> None:
    values = STREAMS[stream]()
    assert values.dtype == torch.float64
    assert 0 < float(values.min()) < float(values.max()) < 1
    assert is_uniform(values)


def test_the_uniformity_test_notices_a_slope() -> None:
    values = along_positions()
    assert not is_uniform(values**1.1)
    assert not are_independent(values, (values + 0.1 * along_positions(1)) % 1)


PAIRS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "neighbouring positions": lambda: (along_positions()[:-1], along_positions()[1:]),
    "positions 64 apart": lambda: (along_positions()[:-64], along_positions()[64:]),
    "rows": lambda: (along_positions(0), along_positions(1)),
    "seeds": lambda: (along_positions(seed=0), along_positions(seed=1)),
    "lanes": lambda: (fresh(Lane.ACCEPT), fresh(Lane.RESIDUAL)),
    "rounds": lambda: (fresh(Lane.ACCEPT, 3), fresh(Lane.ACCEPT, 4)),
    "round and lane": lambda: (fresh(Lane.ACCEPT, 3), fresh(Lane.RESIDUAL, 2)),
    "shared and fresh": lambda: (along_positions(), fresh(Lane.DRAFT)),
    "a key and its split": lambda: _with_split(0, None),
    "two splits": lambda: _with_split(0, 1),
    "events": lambda: _events(),
    "events and the next position": lambda: _diagonal(),
}


def _with_split(first: int, second: int | None) -> tuple[Tensor, Tensor]:
    keys = noise().shared_keys(POSITIONS)
    other = keys if second is None else keys.split(second)
    return keys.split(first).uniform()[0], other.uniform()[0]


def _events() -> tuple[Tensor, Tensor]:
    left, right = noise().shared_keys(POSITIONS).uniform(2)[0].unbind(-1)
    return left, right


def _diagonal() -> tuple[Tensor, Tensor]:
    """Event 1 of a position and event 0 of the next: a weak mix would make them equal."""
    values = noise().shared_keys(POSITIONS).uniform(2)[0]
    return values[:-1, 1], values[1:, 0]


@pytest.mark.parametrize("pair", PAIRS)
def test_streams_are_independent(pair: str) -> None:
    left, right = PAIRS[pair]()
    assert are_independent(left, right)


@pytest.mark.parametrize("seed", [0, 3, 1 << 40])
def test_no_two_keys_of_a_request_agree(seed: int) -> None:
    """4 rows, 50 rounds, the walk's and the named lanes, 20 indices, and 1 000 positions.

    Small seeds count, because rounds are small numbers too.
    """
    rows, keys = noise(seed), []
    lanes = [*range(1, 5), *(Lane.WALK + step for step in range(8))]
    for turn, lane in itertools.product(range(50), lanes):
        keys.append(rows.at_round(turn).fresh_keys(lane, torch.arange(20)).key.flatten())
    keys.append(rows.shared_keys(torch.arange(1000).expand(4, -1)).key.flatten())
    every = torch.cat(keys)
    assert len(every.unique()) == len(every)


def test_the_shared_noise_ignores_the_round_and_the_batch() -> None:
    positions = torch.tensor([[5, 6, 7]])
    alone = KeyedNoise.from_seed(3, 1, CPU, row_ids=[2])
    together = noise(3).at_round(9)
    row = together.shared_keys(positions.expand(4, -1)).uniform(8)[2:3]
    assert torch.equal(alone.shared_keys(positions).uniform(8), row)
    assert torch.equal(alone.shared_keys(positions[:, 1:2]).uniform(8), row[:, 1:2])
    index = torch.arange(3)
    assert torch.equal(
        alone.at_round(9).fresh_keys(Lane.DRAFT, index).uniform(),
        together.fresh_keys(Lane.DRAFT, index).uniform()[2:3],
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_every_device_draws_the_same() -> None:
    there = torch.device("cuda")
    keys = KeyedNoise.from_seed(3, 2, there).shared_keys(
        torch.arange(9, device=there).expand(2, -1)
    )
    here = KeyedNoise.from_seed(3, 2, CPU).shared_keys(torch.arange(9).expand(2, -1))
    assert torch.equal(keys.uniform(50).cpu(), here.uniform(50))
    assert_close(keys.gumbel(50).cpu(), here.gumbel(50), atol=1e-6, rtol=1e-6)


def test_values_are_pinned() -> None:
    """A seed means the same text in every release and on every machine."""
    keys = KeyedNoise.from_seed(1, 1, CPU).shared_keys(torch.tensor([[0, 1, 100]]))
    again = KeyedNoise.from_seed(1 + (1 << 64), 1, CPU).shared_keys(torch.tensor([[0, 1, 100]]))
    assert torch.equal(keys.key, again.key)  # seeds count modulo 2 ** 64
    three, two = np.arange(2, 4)[::-1]  # of a type whose products are cut off
    counted = KeyedNoise.from_seed(three, 1, CPU, [two])
    assert torch.equal(counted.rows, KeyedNoise.from_seed(3, 1, CPU, [2]).rows)
    negative = KeyedNoise.from_seed(-1, 1, CPU).shared_keys(torch.tensor([[0]]))
    assert not torch.equal(keys.key[:, :1], negative.key)
    assert_close(keys.uniform()[0].tolist(), PINNED, atol=1e-15, rtol=0)


PINNED = [0.8847898165349133, 0.3313223755286843, 0.5184555330730105]


def test_gumbel_noise_makes_an_argmax_a_draw() -> None:
    """The Gumbel-max trick, with a distribution of very unequal probabilities."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.009, 0.001])
    distribution = Categorical(probs.log().expand(1, COUNT, -1))
    drawn = distribution.sample(noise(2, 1).shared_keys(POSITIONS))[0]
    counts = torch.bincount(drawn, minlength=6).double()
    assert p_value(counts, probs.double() * COUNT) > RATE


def test_the_runner_up_is_a_draw_without_the_winner() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2])
    distribution = Categorical(probs.log().expand(1, COUNT, -1))
    top = distribution.perturb(noise(4, 1).shared_keys(POSITIONS))[0].topk(2).indices
    counts = torch.bincount(top[:, 0] * 3 + top[:, 1], minlength=9).double()
    expected = torch.tensor(
        [
            0 if i == j else float(probs[i] * probs[j] / (1 - probs[i]))
            for i, j in itertools.product(range(3), repeat=2)
        ],
        dtype=torch.float64,
    )
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert p_value(counts[possible], expected[possible] * COUNT) > RATE


def test_normals_are_normal() -> None:
    values = noise(1, 1).shared_keys(POSITIONS).normal(2)[0]
    assert values.dtype == torch.float32
    assert is_uniform(torch.special.ndtr(values.double()))
    assert are_independent(*torch.special.ndtr(values.double()).unbind(-1))


def test_extreme_gumbels_are_finite() -> None:
    values = Keys(torch.arange(200_000)).gumbel(8)
    assert bool(values.isfinite().all())
    assert float(values.max()) > 12  # 1.6 million draws: the largest is about log(1.6e6) = 14.3
    assert float(values.min()) < -2


def test_flip_and_pick_follow_their_probabilities() -> None:
    rows = noise(6, COUNT)
    flips = rows.flip(torch.full((COUNT,), 0.3), Lane.ACCEPT)
    counts = torch.bincount(flips.long(), minlength=2).double()
    distribution = torch.tensor([0.7, 0.3], dtype=torch.float64)
    assert flips.dtype == torch.bool
    assert p_value(counts, distribution * COUNT) > RATE
    weights = torch.tensor([1.0, 0.0, 3.0, 4.0])
    picks = rows.pick(weights.expand(COUNT, -1), Lane.RESIDUAL)
    counts = torch.bincount(picks, minlength=4).double()
    assert counts[1] == 0
    assert p_value(counts[[0, 2, 3]], torch.tensor([1.0, 3.0, 4.0]).double() / 8 * COUNT) > RATE
    assert not bool(rows.flip(torch.zeros(COUNT), Lane.OTHER).any())
    assert bool(rows.flip(torch.ones(COUNT), Lane.OTHER).all())


@pytest.mark.parametrize("lane", [Lane.RESIDUAL, Lane.WALK, Lane.WALK + 7])
def test_one_index_is_picked_per_row_on_every_lane(lane: int) -> None:
    """Also where numbers of several lanes are drawn together."""
    rows, weights = noise(6, 5), torch.tensor([1.0, 0.0, 3.0, 4.0]).expand(5, -1)
    assert rows.pick(weights, lane).shape == (5,)


@pytest.mark.parametrize("first", [Lane.ACCEPT, Lane.WALK + 7])
def test_coins_are_the_flips_of_their_lanes(first: int) -> None:
    rows, chance = noise(6, 500).at_round(11), torch.linspace(0, 1, 500)
    coins = rows.prepare_flips(first + torch.tensor([[0, 1], [70_000, 70_001]]))
    places = {(0, 0): 0, (0, 1): 1, (1, 0): 70_000, (1, 1): 70_001}
    flips = {place: rows.flip(chance, first + behind) for place, behind in places.items()}
    for place, flip in flips.items():
        assert torch.equal(coins(place, chance), flip)
    assert not torch.equal(flips[0, 0], flips[0, 1])


def test_row_ids_are_one_per_row() -> None:
    with pytest.raises(ValueError, match="row_ids has 3 entries for 2 rows; give one per row"):
        KeyedNoise.from_seed(0, 2, CPU, row_ids=[1, 2, 3])


def test_a_seed_may_be_a_number_of_numpy() -> None:
    here = torch.device("cpu")
    expected = KeyedNoise.from_seed(3, 2, here, [5, 1 << 40])
    kinds: tuple[Any, ...] = (np.int64, np.uint64)
    for kind in kinds:
        found = KeyedNoise.from_seed(kind(3), 2, here, [kind(5), kind(1 << 40)])
        assert torch.equal(found.rows, expected.rows)


def test_rows_that_join_a_batch_keep_the_noise_they_have_alone() -> None:
    """Row b, in round r of the batch, has the noise of its own round r - starts[b]."""
    first, second, third = (KeyedNoise.from_seed(seed, 1, CPU) for seed in range(3))
    batch = first.join(second, 3).join(third, 5).select(torch.tensor([2, 1]))
    probability, weights = torch.full((2, 50), 0.5), torch.rand(2, 9)
    lanes = torch.arange(6).view(2, 3)
    for step in (6, 9):
        now = batch.at_round(step)
        flips = now.prepare_flips(lanes)((1,), torch.full((3, 2), 0.5))
        for row, (alone, start) in enumerate(((third, 5), (second, 3))):
            own = alone.at_round(step - start)
            one = slice(row, row + 1)
            assert_close(now.flip(probability, 7)[one], own.flip(probability[one], 7))
            assert now.pick(weights, Lane.RESIDUAL)[row] == own.pick(weights[one], Lane.RESIDUAL)[0]
            index = torch.arange(4)
            assert_close(
                now.fresh_keys(Lane.DRAFT, index).uniform()[one],
                own.fresh_keys(Lane.DRAFT, index).uniform(),
            )
            alone_flips = own.prepare_flips(lanes)((1,), torch.full((3, 1), 0.5))
            assert_close(flips[:, one], alone_flips)


def test_uniforms_of_float32_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to float32 at any size, so that large Gumbel values keep their precision."""
    keys = Keys(torch.arange(200_000))
    wide, gumbel = keys.uniform(), keys.gumbel(8)
    monkeypatch.setitem(noise_module._FLOAT64, "cpu", False)
    narrow, values = keys.uniform(), keys.gumbel(8)
    assert narrow.dtype == torch.float32
    assert ((narrow.double() - wide).abs() <= wide * 2.0**-23).all()
    assert values.isfinite().all()
    assert_close(values[gumbel > 0], gumbel[gumbel > 0], atol=1e-6, rtol=1e-5)
    largest = noise_module._unit(torch.tensor([-1, 0]))
    assert ((largest > 0) & (largest < 1)).all()


def test_numbers_drawn_for_several_rounds_are_those_of_each() -> None:
    """Also for rows that joined later, for other rows of the same object, and beyond a table."""
    first, second = (KeyedNoise.from_seed(seed, 2, CPU) for seed in range(2))
    for batch in (first, first.join(second, 3), first.join(second, 3).select(torch.tensor([3, 0]))):
        for turn in (4, 5, 60, 5):
            now = batch.at_round(turn)
            fresh = replace(now, tables={})
            keys = fresh.fresh_keys(Lane.DRAFT, torch.arange(3))
            assert torch.equal(now.fresh_gumbel(Lane.DRAFT, 3, 7), keys.gumbel(7))
            assert torch.equal(now.fresh_uniform(Lane.DRAFT, 3, 7), keys.uniform(7))
            weights = torch.rand(len(now.rows), 9)
            assert torch.equal(now.pick(weights, Lane.RESIDUAL), fresh.pick(weights, Lane.RESIDUAL))
            own = replace(now, rows=now.rows.flip(0), starts=None)
            alone = replace(own, tables={}).pick(weights, Lane.RESIDUAL)
            assert torch.equal(own.pick(weights, Lane.RESIDUAL), alone)


def test_the_noise_of_positions_is_that_of_their_keys() -> None:
    rows = noise(3, 2)
    for lengths in ((40, 40), (41, 43), (70, 71), (5, 5), (6, 90)):
        position = torch.tensor(lengths)[:, None] + torch.arange(4)
        expected = rows.shared_keys(position).gumbel(6)
        assert torch.equal(rows.at_round(lengths[0]).position_gumbel(lengths, 4, 6), expected)


def test_a_choice_follows_its_survival_and_levels_are_independent() -> None:
    rows = noise(8, COUNT)
    survival = torch.tensor([[0.7, 0.2], [0.5, 0.5], [1.0, 0.0]]).expand(COUNT, -1, -1)
    level = torch.tensor([[0], [1], [1]])
    slot = rows.choose(survival, level, 2, Lane.WALK)
    for branch, shares in ((0, (0.3, 0.5, 0.2)), (1, (0.5, 0.0, 0.5)), (2, (0.0, 1.0, 0.0))):
        counts = torch.bincount(slot[:, branch], minlength=3).double()
        share = torch.tensor(shares).double()
        assert counts[share == 0].sum() == 0
        if (share > 0).sum() > 1:
            assert p_value(counts[share > 0], share[share > 0] * COUNT) > RATE
    pairs = torch.bincount(slot[:, 0] * 3 + slot[:, 1], minlength=9).double()
    joint = torch.tensor([0.3, 0.5, 0.2]).double()[:, None] * torch.tensor([0.5, 0.5]).double()
    assert p_value(pairs.view(3, 3)[:, [0, 2]].flatten(), joint.flatten() * COUNT) > RATE
    by_row = level.expand(COUNT, -1, -1)
    assert torch.equal(rows.choose(survival, by_row, 2, Lane.WALK), slot)
