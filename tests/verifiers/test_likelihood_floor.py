"""Likelihood floor: likely drafts are accepted; above one half it is greedy decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind, Rule, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.all_or_nothing import AllOrNothing
from mmspec.verifiers.distances import measure
from mmspec.verifiers.enumeration import (
    ancestral_joint,
    enumerate_emitted,
    enumerate_joint,
    enumerate_rounds,
)
from mmspec.verifiers.likelihood_floor import LikelihoodFloor
from mmspec.verifiers.recursive import Recursive
from tests.verifiers.random_distributions import by_prefix, vector
from tests.verifiers.test_coarse_groups import PAIRS, close, hard


@pytest.mark.parametrize("floor", [0.0, 0.05, 0.2, 0.6, 1.5])
def test_a_floor_keeps_what_is_likely_enough(floor: float) -> None:
    for p, q in PAIRS:
        kept = (p >= floor).double()
        wanted = q * kept + (1 - (q * kept).sum()) * p
        step = measure(LikelihoodFloor(floor), p, q)
        assert torch.equal(step.accept, kept)
        close(step.output, wanted)
        greedy = measure(LikelihoodFloor(floor), Categorical(p.log() + 3, hard=True), q)
        assert torch.equal(greedy.accept, kept)  # the distribution behind the point mass


@pytest.mark.parametrize("walk", [Recursive, AllOrNothing])
def test_a_floor_above_one_half_is_greedy_decoding(walk: Callable[[Rule], Verifier]) -> None:
    for seed in range(6):
        p, q = hard(by_prefix(seed)), by_prefix(seed + 1000)
        found = enumerate_joint(p, q, walk(LikelihoodFloor(0.51)), Tree.chain(3), Kind.DET)
        assert_close(found, ancestral_joint(p, 4), atol=1e-12, rtol=0)


def test_a_lower_floor_is_not_greedy_decoding() -> None:
    p, q = Categorical(vector(0.55, 0.45).log(), hard=True), vector(0.1, 0.9)
    assert enumerate_emitted(p, q, LikelihoodFloor(0.4), kind=Kind.DET).tolist() == [0, 1]
    assert enumerate_emitted(p, q, LikelihoodFloor(0.51), kind=Kind.DET).tolist() == [1, 0]


def test_a_restart_drops_accepted_tokens() -> None:
    p = vector(0.6, 0.3, 0.1)
    q = vector(0.1, 0.3, 0.6)  # proposes 2 after each prefix

    def likely(prefix: tuple[int, ...]) -> Categorical:
        return Categorical((p if prefix else vector(0.1, 0.1, 0.8)).log(), hard=True)

    resumed = enumerate_rounds(likely, q, LikelihoodFloor(0.2), Tree.chain(2), Kind.DET)
    anew = enumerate_rounds(likely, q, AllOrNothing(LikelihoodFloor(0.2)), Tree.chain(2), Kind.DET)
    assert_close(resumed.lengths, vector(0, 1, 0))
    assert_close(anew.lengths, vector(1, 0, 0))
    both = AllOrNothing(LikelihoodFloor(0.05))
    assert_close(
        enumerate_rounds(likely, q, both, Tree.chain(2), Kind.DET).lengths, vector(0, 0, 1)
    )
