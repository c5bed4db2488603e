"""Children are drawn as their kind specifies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Kind
from mmspec.drafters.trees.draws import draw

NOISE = KeyedNoise.from_seed(4, 1, torch.device("cpu"))
COUNT = 40_000
Q = torch.tensor([0.4, 0.3, 0.2, 0.1])


def sample(kind: Kind, count: int, q: Tensor = Q, nodes: int = COUNT) -> Tensor:  # (nodes, count)
    index = torch.arange(nodes)
    distribution = Categorical.from_weights(q.expand(1, nodes, -1))
    return draw(distribution, count, kind, NOISE, index[None], index)[0]


def assert_frequencies(children: Tensor, expected: Mapping[Any, float]) -> None:
    """Chi-square; false alarm 1e-6. What is not expected must not happen."""
    found = Counter(tuple(row) for row in children.tolist())
    assert set(found) <= set(expected)
    total = len(children)
    statistic = sum((found[x] - total * e) ** 2 / (total * e) for x, e in expected.items())
    freedom = torch.tensor((len(expected) - 1) / 2)
    assert torch.special.gammaincc(freedom, torch.tensor(statistic / 2)) > 1e-6


def test_independent_children() -> None:
    pairs = {(a, b): float(Q[a] * Q[b]) for a in range(4) for b in range(4)}
    assert_frequencies(sample(Kind.IID, 2), pairs)


@pytest.mark.parametrize("kind", [Kind.WOR, Kind.RACE])
def test_children_without_replacement(kind: Kind) -> None:
    pairs = {(a, b): float(Q[a] * Q[b] / (1 - Q[a])) for a, b in permutations(range(4), 2)}
    assert_frequencies(sample(kind, 2), pairs)


def test_hub_children() -> None:
    assert_frequencies(sample(Kind.HUB, 1), {(x,): float(Q[x]) for x in range(4)})
    assert_frequencies(sample(Kind.HUB, 3), {(0, 1, 2): 2 / 3, (0, 1, 3): 1 / 3})


def test_chosen_children_are_the_best_in_order() -> None:
    assert sample(Kind.DET, 3, nodes=2).tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("kind", [Kind.IID, Kind.WOR, Kind.HUB])
def test_other_kinds_draw_with_noise_of_their_own(kind: Kind) -> None:
    """Of this round and node, whatever the position: the target's noise would bias what is kept."""
    distribution, index = Categorical.from_weights(Q.expand(1, 300, -1)), torch.arange(300)
    drawn = draw(distribution, 2, kind, NOISE, index[None], index)
    assert torch.equal(drawn, draw(distribution, 2, kind, NOISE, index[None] + 7, index))
    assert not torch.equal(
        drawn, draw(distribution, 2, kind, NOISE.at_round(1), index[None], index)
    )
    own = distribution.sample(NOISE.shared_keys(index[None]))
    same = float((drawn[..., -1 if kind is Kind.HUB else 0] == own).float().mean())
    wanted = float((Q[1:] / Q[1:].sum() * Q[1:]).sum() if kind is Kind.HUB else Q.square().sum())
    assert same == pytest.approx(wanted, abs=0.15)  # five standard deviations; 1 if it were shared


def test_a_race_is_run_with_the_target_s_noise() -> None:
    position = torch.arange(50)[None]
    distribution = Categorical(torch.randn(1, 50, 7, generator=torch.Generator().manual_seed(0)))
    target = distribution.sample(NOISE.shared_keys(position))
    for count in (1, 3):
        first = draw(distribution, count, Kind.RACE, NOISE, position, position)[..., 0]
        assert torch.equal(first, target)
    level = draw(distribution, 2, Kind.RACE, NOISE, torch.full((1, 1), 9), torch.arange(50))
    assert torch.equal(
        level, draw(distribution, 2, Kind.RACE, NOISE, torch.full((1, 50), 9), position)
    )


@pytest.mark.parametrize("kind", list(Kind))
def test_greedy_drafting_takes_the_best(kind: Kind) -> None:
    distribution = Categorical(torch.tensor([[[0.1, 3.0, 2.0, -1.0]]]), hard=True)
    where = torch.zeros(1, 1, dtype=torch.int64)
    for count, best in ((1, [1]), (3, [1, 2, 0])):
        assert draw(distribution, count, kind, NOISE, where, where)[0, 0].tolist() == best


@pytest.mark.parametrize("kind", [Kind.WOR, Kind.DET, Kind.HUB, Kind.RACE])
def test_children_stay_distinct_where_the_distribution_runs_out(kind: Kind) -> None:
    children = sample(kind, 3, torch.tensor([0.0, 1.0, 0.0, 0.0]), nodes=20)
    assert (children[:, 0] == 1).all()
    assert all(len(set(row)) == 3 for row in children.tolist())


def test_impossible_tokens_are_not_drawn() -> None:
    assert set(sample(Kind.IID, 3, torch.tensor([0.0, 0.5, 0.5, 0.0])).flatten().tolist()) == {1, 2}


def test_more_children_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="5 children from a vocabulary of 4"):
        sample(Kind.WOR, 5)
