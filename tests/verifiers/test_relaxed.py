"""Relaxed rules for image tokens: exact at their neutral value, else off by a known amount."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind, Rule, RuleSchedule
from mmspec.trees import Tree
from mmspec.verifiers.annealed import Annealed
from mmspec.verifiers.distances import measure, total_variation
from mmspec.verifiers.enumeration import (
    ancestral_joint,
    enumerate_emitted,
    enumerate_joint,
    enumerate_rounds,
)
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.grouped import Grouped, RankWindow
from mmspec.verifiers.latent_neighbourhood import (
    AdditiveBound,
    ClearedTarget,
    LatentNeighbourhood,
    Multiplicative,
)
from mmspec.verifiers.local_islands import LocalIslands
from mmspec.verifiers.neighbourhood_threshold import NeighbourhoodThreshold
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.typical import Typical
from tests.covering import covering
from tests.verifiers.random_distributions import book, by_prefix, distributions, near

KINDS = [Kind.IID, Kind.WOR, Kind.DET]


@dataclass(frozen=True, eq=False)
class Partition:
    """A grouping whose groups do not overlap: one label per token."""

    labels: Tensor  # (V,) int64

    def masses(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        same = self.labels == self.labels[x][..., None]
        return (p * same).sum(-1), (q * same).sum(-1)


NEUTRAL: list[Rule | RuleSchedule] = [
    LatentNeighbourhood(near(3, 2), 2, AdditiveBound(0)),
    LatentNeighbourhood(near(3, 2), 2, Multiplicative(1)),
    Annealed(1),
    Annealed(1, inner=Grouped(RankWindow(1))),
    Grouped(RankWindow(0)),
    Grouped(RankWindow(1)),
    Grouped(RankWindow(3, codebook=book(3), distance=1e-9)),
    Grouped(Partition(torch.arange(3))),
    NeighbourhoodThreshold(near(3, 2), 2, tau=1.5),
]


@pytest.mark.parametrize(
    ("tree", "rule"),
    covering([Tree.chain(3), Tree.branching([2, 1])], NEUTRAL, strength=1),
    ids=str,
)
def test_where_nothing_is_allowed_the_target_s_distribution_comes_out(
    rule: Rule | RuleSchedule, tree: Tree
) -> None:
    for kind in KINDS:
        for seed in range(2):
            p, q = by_prefix(seed), by_prefix(seed + 1000)
            found = enumerate_joint(p, q, Recursive(rule), tree, kind)
            assert_close(found, ancestral_joint(p, tree.depth + 1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("rule", NEUTRAL[:3] + NEUTRAL[4:8], ids=repr)
def test_where_nothing_is_allowed_the_same_tokens_are_accepted(rule: Rule | RuleSchedule) -> None:
    for seed in range(2):
        p, q = by_prefix(seed), by_prefix(seed + 1000)
        for kind in KINDS:
            ours, exact = (
                enumerate_rounds(p, q, Recursive(one), Tree.chain(2), kind).lengths
                for one in (rule, Exact())
            )
            assert_close(ours, exact, atol=1e-12, rtol=0)


RELAXED: list[Rule] = [
    LatentNeighbourhood(near(7, 4), 3, AdditiveBound(0.3)),
    LatentNeighbourhood(near(7, 4), 3, Multiplicative(3)),
    Annealed(1.6).at(0, 4),
    Grouped(RankWindow(4, gap=0.3)),
    Grouped(Partition(torch.arange(7) // 2)),
]
RELEASED: list[Rule] = [
    LatentNeighbourhood(near(7, 4), 3, bound, ClearedTarget())
    for bound in (AdditiveBound(0.3), Multiplicative(3))
]
THRESHOLD = NeighbourhoodThreshold(near(7, 4), 3, tau=0.4)


@pytest.mark.parametrize("rule", [*RELAXED, *RELEASED, THRESHOLD], ids=repr)
def test_one_step_does_what_its_formula_predicts(rule: Rule) -> None:
    for p, q in zip(*distributions(6, 7), strict=True):
        step = measure(rule, p, q)
        assert_close(step.output, enumerate_emitted(p, q, rule, kind=Kind.IID), atol=1e-12, rtol=0)
        assert_close(step.output.sum(), torch.ones(()).double())
        assert step.distance >= step.over_accepted - 1e-14


@pytest.mark.parametrize("rule", RELAXED, ids=repr)
def test_the_output_is_off_by_what_was_accepted_too_often(rule: Rule) -> None:
    """Holds for grouped rules too, as long as they reject no more than speculative sampling."""
    counted = 0
    for p, q in zip(*distributions(30, 7), strict=True):
        step = measure(rule, p, q)
        if step.rejected <= total_variation(p, q):
            assert_close(step.distance, step.over_accepted, atol=1e-14, rtol=0)
            counted += bool(step.over_accepted > 1e-3)
    assert counted > 20


@pytest.mark.parametrize("rule", [*RELAXED[:4], *RELEASED], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_stays_exact(rule: Rule, kind: Kind) -> None:
    """Fixed groups aside, which hold other tokens than the target's."""
    scores = torch.randn(7, generator=torch.Generator().manual_seed(4)).double()
    greedy = Categorical(scores, hard=True)
    q = distributions(1, 7)[1][0]
    for siblings in (1, 2):
        found = enumerate_emitted(greedy, q, rule, siblings, kind)
        assert_close(found, greedy.probs, atol=1e-12, rtol=0)


def test_bad_settings_are_refused() -> None:
    table = near(7, 3)
    for make, says in (
        (lambda: AdditiveBound(1.5), "delta is 1.5"),
        (lambda: AdditiveBound(-0.1), "delta is -0.1"),
        (lambda: Multiplicative(0.5), "factor is 0.5"),
        (lambda: LatentNeighbourhood(table, 4, AdditiveBound(0.1)), "k=4, but the table holds 3"),
        (lambda: LatentNeighbourhood(table, 0, AdditiveBound(0.1)), "k=0"),
        (lambda: NeighbourhoodThreshold(table, 4, 0.1), "k=4, but the table holds 3"),
        (lambda: NeighbourhoodThreshold(table, 3, -0.1), "tau is -0.1"),
        (lambda: Annealed(0.9), "delta=0.9"),
        (lambda: Annealed(1.1, nu=-1), "nu=-1"),
        (lambda: Annealed(1.1, nu=math.inf), "nu=inf"),
        (lambda: Annealed(math.inf), "delta=inf"),
        (lambda: Annealed(math.nan), "delta=nan"),
        (lambda: Multiplicative(math.nan), "factor is nan"),
        (lambda: NeighbourhoodThreshold(table, 3, math.nan), "tau is nan"),
        (lambda: LocalIslands(Exact(), math.nan), "reach=nan"),
        (lambda: Typical(math.nan, 0.3), "epsilon is nan"),
        (lambda: RankWindow(3, math.nan), "gap=nan"),
        (lambda: RankWindow(-1), "size=-1"),
        (lambda: RankWindow(3, gap=0), "gap=0"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    p, q = distributions(1, 9)
    for rule in (
        LatentNeighbourhood(table, 3, AdditiveBound(0.1)),
        NeighbourhoodThreshold(table, 3, 0.1),
    ):
        with pytest.raises(ValueError, match=r"counts 7 token ids, but .* has 9"):
            measure(rule, p, q)
