"""Relaxed rules for picture tokens: exact where they allow nothing, off by a known amount else."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.codes.codebook import Codebook
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Rule, RuleSchedule, Scores, Verdict, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.annealed import Annealed, WeightedRule
from mmspec.verifiers.distances import measure, over_accepted, total_variation
from mmspec.verifiers.enumeration import ancestral, distribution, enumerate_rounds, joint
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.grouped import Grouped, RankWindow
from mmspec.verifiers.lantern_residuals import ClearedTarget
from mmspec.verifiers.latent_neighbourhood import AdditiveBound, LatentNeighbourhood, Multiplicative
from mmspec.verifiers.local_islands import LocalIslands
from mmspec.verifiers.neighbourhood_threshold import NeighbourhoodThreshold
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.typical import Typical
from mmspec.verifiers.walk import one_hot
from tests.verifiers.drawn_distributions import book, by_prefix, distributions, near, vector

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


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.branching([2, 1])], ids=str)
@pytest.mark.parametrize("rule", NEUTRAL, ids=repr)
def test_where_nothing_is_allowed_the_target_s_distribution_comes_out(
    rule: Rule | RuleSchedule, tree: Tree
) -> None:
    for kind in KINDS:
        for seed in range(2):
            p, q = by_prefix(seed), by_prefix(seed + 1000)
            found = joint(p, q, Recursive(rule), tree, kind)
            assert_close(found, ancestral(p, tree.depth + 1), atol=1e-12, rtol=0)


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
def test_one_step_does_what_its_formula_says(rule: Rule) -> None:
    for p, q in zip(*distributions(6, 7), strict=True):
        step = measure(rule, p, q)
        assert_close(step.output, distribution(p, q, rule, kind=Kind.IID), atol=1e-12, rtol=0)
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
        found = distribution(greedy, q, rule, siblings, kind)
        assert_close(found, greedy.probs, atol=1e-12, rtol=0)


# Cool-SD


def test_weights_fall_and_keep_their_mean() -> None:
    for longest in (1, 2, 5, 16):
        weights = Annealed(20.0, nu=0.1).weights(longest)
        assert_close(weights.mean(), torch.tensor(20.0).double())
        ratio = weights[1:] / weights[:-1]
        assert_close(ratio, torch.full_like(ratio, -0.1).exp())
    for delta, above in ((1.1, 1), (1.3, 2), (2.0, 3), (9.0, 5)):  # how many are above 1
        low = Annealed(delta).weights(5)
        assert_close(low.mean(), torch.tensor(delta).double())
        assert int((low > 1).sum()) == above
        assert (low.diff() <= 0).all()
    assert torch.equal(Annealed(1).weights(5), torch.ones(5).double())


def test_every_depth_is_tested_with_its_own_weight() -> None:
    for seed in range(3):
        p, q = (distribution_[0] for distribution_ in distributions(1, 4, seed))
        rule = Annealed(1.5)
        weights = rule.weights(3)
        a, b, c = (float(torch.minimum(q, w * p).sum()) for w in weights)
        reached = [1 - a, a * (1 - b), a * b * (1 - c), a * b * c]
        chain = enumerate_rounds(p, q, Recursive(rule), Tree.chain(3), Kind.IID)
        assert_close(chain.lengths, vector(*reached), atol=1e-12, rtol=0)
        walked = enumerate_rounds(p, q, Ragged(Recursive(rule)), Tree.chain(3), Kind.IID)
        assert_close(walked.lengths, chain.lengths, atol=1e-12, rtol=0)
        assert_close(walked.joint, chain.joint, atol=1e-12, rtol=0)


def test_a_step_over_accepts_as_its_formula_says() -> None:
    p, q = distributions(10, 8)
    for depth, weight in enumerate(Annealed(1.7).weights(5)):
        wanted = (torch.minimum(q, weight * p) - p).clamp_min(0).sum(-1)
        assert_close(measure(Annealed(1.7).at(depth, 5), p, q).over_accepted, wanted)
    everything = measure(WeightedRule(Exact(), torch.tensor(1e12)), p, q)
    assert_close(everything.output, q)


def test_forgiving_early_costs_less_than_forgiving_late() -> None:
    """Two tokens, the same expected number accepted: the early relaxation is nearer to p."""
    for seed in range(6):
        p, q = (distribution_[0] for distribution_ in distributions(1, 4, seed))

        def accepted(weight: float, p: Tensor = p, q: Tensor = q) -> float:
            return float(torch.minimum(q, weight * p).sum())

        wanted = accepted(1) * (1 + accepted(1.6))
        low, high = 1.0, 1.6
        for _ in range(60):
            middle = (low + high) / 2
            more = accepted(middle) * (1 + accepted(1)) < wanted
            low, high = (middle, high) if more else (low, middle)
        off, lengths = [], []
        for weights in ((low, 1.0), (1.0, 1.6)):
            rule = Steps(vector(*weights))
            found = enumerate_rounds(p, q, Recursive(rule), Tree.chain(2), Kind.IID)
            off.append(float(total_variation(found.joint.flatten(), ancestral(p, 3).flatten())))
            lengths.append(float(found.lengths @ torch.arange(3.0).double()))
        assert lengths[0] == pytest.approx(lengths[1], abs=1e-9)
        assert off[0] < off[1]


def test_annealing_wraps_any_rule() -> None:
    inner = LatentNeighbourhood(near(7, 4), 3, Multiplicative(2))
    p, q = distributions(6, 7)
    rule = Annealed(1.5, nu=0, inner=inner).at(torch.tensor(2), 4)
    wanted = (1.5 * measure(inner, p, q).accept).clamp_max(1)
    assert_close(measure(rule, p, q).accept, wanted)


@dataclass(frozen=True)
class Steps:
    """A weight per depth, as given."""

    weights: Tensor
    lossless: ClassVar[bool] = False

    def at(self, depth: Tensor | int, longest: int) -> Rule:
        return WeightedRule(Exact(), self.weights[depth])


@dataclass(frozen=True)
class Ragged(Verifier):
    """A verifier that is not told that all rows have one topology."""

    verifier: Recursive
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = tuple(KINDS)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        return self.verifier.verify(replace(draft, tree=None), scores, noise)


# GSD


def test_a_window_takes_the_neighbours_in_rank() -> None:
    p = vector(0.30, 0.02, 0.05, 0.20, 0.25, 0.10, 0.08)  # ranks upwards: 1 2 6 5 3 4 0
    q = distributions(1, 7)[1][0]
    for size, x, members in (
        (2, 5, [6, 5]),
        (3, 5, [6, 5, 3]),
        (4, 5, [2, 6, 5, 3]),
        (4, 1, [1, 2]),
        (3, 0, [4, 0]),
        (14, 3, list(range(7))),
    ):
        found = RankWindow(size, gap=1.0).masses(p, q, torch.tensor(x))
        assert_close(torch.stack(found), torch.stack([p[members].sum(), q[members].sum()]))
    gap = RankWindow(4, gap=0.06).masses(p, q, torch.tensor(5))  # token 3 is 0.1 away
    assert_close(torch.stack(gap), torch.stack([p[[2, 6, 5]].sum(), q[[2, 6, 5]].sum()]))
    codes = Codebook.at(vector(0, 0, 0.9, 0.1, 0, 0, 0.6)[:, None])
    close = RankWindow(4, gap=1.0, codebook=codes, distance=0.5).masses(p, q, torch.tensor(5))
    assert_close(torch.stack(close), torch.stack([p[[6, 5, 3]].sum(), q[[6, 5, 3]].sum()]))


def test_what_is_as_far_as_the_bound_is_outside_a_window() -> None:
    p, q = vector(0.5, 0.25, 0.25), vector(0.25, 0.25, 0.5)
    x = torch.tensor(0)
    own = torch.stack((p[0], q[0]))
    assert_close(torch.stack(RankWindow(4, gap=0.25).masses(p, q, x)), own)
    codes = Codebook.at(vector(0, 0.5, 4)[:, None])  # 0.25 apart, squared
    bounded = RankWindow(4, gap=1.0, codebook=codes, distance=0.25)
    assert_close(torch.stack(bounded.masses(p, q, x)), own)
    wider = replace(bounded, distance=0.26).masses(p, q, x)
    assert_close(torch.stack(wider), own + 0.25)


def test_a_token_that_the_target_rules_out_is_rejected() -> None:
    p, q = vector(0, 0, 0, 0.3, 0.7), vector(0.2, 0.2, 0.2, 0.2, 0.2)
    accept = measure(Grouped(RankWindow(5, gap=1.0)), p, q).accept
    assert accept[:3].tolist() == [0, 0, 0]


def test_one_group_of_all_accepts_everything() -> None:
    p, q = distributions(5, 7)
    for rule in (Grouped(RankWindow(14, gap=2.0)), Grouped(Partition(torch.zeros(7).long()))):
        assert_close(measure(rule, p, q).output, q, atol=1e-14, rtol=0)


def test_groups_that_do_not_overlap_accept_at_least_as_often() -> None:
    p, q = distributions(40, 9)
    for labels in ([0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 0, 1, 0, 1, 0, 1, 2]):
        groups = torch.tensor(labels)
        step = measure(Grouped(Partition(groups)), p, q)
        pooled = [one @ one_hot(groups, one) for one in (p, q)]
        assert_close(1 - step.rejected, torch.minimum(*(m[:, :3] for m in pooled)).sum(-1))
        assert (step.rejected <= total_variation(p, q) + 1e-14).all()


def test_windows_accept_some_tokens_less_than_speculative_sampling() -> None:
    p, q = distributions(40, 9)
    accept = measure(Grouped(RankWindow(4, gap=1.0)), p, q).accept
    vanilla = (p / q).clamp_max(1)
    assert (accept < vanilla - 0.05).any()
    assert (accept > vanilla + 0.05).any()


# MuLo-SD, on codes 0, 1, 2.5 and 10

LINE = Codebook.at(torch.tensor([[0.0], [1.0], [2.5], [10.0]])).neighbours(3)
P, Q = vector(0.10, 0.10, 0.55, 0.25), vector(0.05, 0.70, 0.10, 0.15)


def test_a_threshold_is_met_or_not() -> None:
    rule = NeighbourhoodThreshold(LINE, 2, tau=0.6)
    accept = measure(rule, P, Q).accept  # neighbours of 0: 1 2; of 1: 0 2; of 2: 1 0; of 3: 2 1
    assert accept.tolist() == [1, 1, 1, 1]
    tight = measure(replace(rule, k=1), P, Q)  # of 0: 1; of 1: 0; of 2: 1; of 3: 2
    assert tight.accept.tolist() == [0, 0, 1, 1]
    kept = Q * tight.accept
    assert_close(tight.output, kept + (1 - kept.sum()) * P)
    assert_close(tight.over_accepted, over_accepted(P, Q, tight.accept))


def test_a_threshold_that_is_reached_is_met() -> None:
    even = vector(0.25, 0.25, 0.25, 0.25)
    assert measure(NeighbourhoodThreshold(LINE, 1, tau=0.5), even, Q).accept.tolist() == [1] * 4
    assert measure(NeighbourhoodThreshold(LINE, 1, tau=0.51), even, Q).accept.tolist() == [0] * 4


def test_a_threshold_of_nothing_emits_the_draft() -> None:
    p, q = distributions(5, 7)
    step = measure(NeighbourhoodThreshold(near(7, 3), 3, tau=0), p, q)
    assert_close(step.output, q)
    assert_close(step.distance, total_variation(p, q))


# Bad settings


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
