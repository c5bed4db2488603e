"""Rank limit: the best few are accepted; one rank is greedy decoding."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.trees import Tree
from mmspec.verifiers.distances import measure
from mmspec.verifiers.enumeration import (
    ancestral_joint,
    enumerate_joint,
)
from mmspec.verifiers.rank_limit import RankLimit
from tests.verifiers.random_distributions import by_prefix, vector
from tests.verifiers.test_coarse_groups import PAIRS, SIZE, close, hard


@pytest.mark.parametrize("ranks", [1, 2, 4, SIZE])
def test_a_rank_keeps_the_best_few(ranks: int) -> None:
    for p, q in PAIRS:
        best = p.argsort(descending=True)[:ranks]
        kept = torch.zeros_like(p).scatter(0, best, 1.0)
        wanted = q * kept + (1 - (q * kept).sum()) * p
        step = measure(RankLimit(ranks), p, q)
        assert torch.equal(step.accept, kept)
        close(step.output, wanted)
        greedy = measure(RankLimit(ranks), Categorical(p.log(), hard=True), q)
        assert torch.equal(greedy.accept, kept)


def test_ties_of_rank_go_to_the_lower_id_and_the_impossible_has_none() -> None:
    p = Categorical(vector(1.0, 2.0, 2.0, 1.0, 2.0), hard=True)
    q = torch.full((5,), 0.2, dtype=torch.float64)
    assert [
        measure(RankLimit(n), p, q).accept.nonzero().flatten().tolist() for n in range(1, 6)
    ] == [
        [1],
        [1, 2],
        [1, 2, 4],
        [0, 1, 2, 4],
        [0, 1, 2, 3, 4],
    ]
    cut = Categorical(vector(1.0, -torch.inf, 2.0, -torch.inf), hard=True)
    assert measure(RankLimit(4), cut, vector(0.25, 0.25, 0.25, 0.25)).accept.tolist() == [
        1,
        0,
        1,
        0,
    ]


def test_one_rank_is_greedy_decoding_and_all_of_them_the_draft() -> None:
    for seed in range(3):
        p, q = hard(by_prefix(seed)), by_prefix(seed + 1000)
        for kind in (Kind.IID, Kind.DET):
            found = enumerate_joint(p, q, RankLimit(1), Tree.chain(2), kind)
            assert_close(found, ancestral_joint(p, 3), atol=1e-12, rtol=0)
    p, q = PAIRS[2]
    close(measure(RankLimit(SIZE), p, q).output, q)
    sampled = measure(RankLimit(1), p, q)
    assert sampled.distance > 0.01  # sampled, one rank is not exact
