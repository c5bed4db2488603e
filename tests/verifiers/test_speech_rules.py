"""Rules for acoustic tokens and transcripts: closed forms to 1e-9, both limits, one direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.codes.codebook import Codebook
from mmspec.distributions.categorical import Categorical, residual
from mmspec.distributions.noise import KeyedNoise, Lane
from mmspec.draft import Draft, Kind, Rule, Scores, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.additive_tolerance import AdditiveTolerance
from mmspec.verifiers.all_or_nothing import AllOrNothing
from mmspec.verifiers.coarse_groups import CoarseGroups, Groups
from mmspec.verifiers.confidence_floor import ConfidenceFloor
from mmspec.verifiers.distances import measure, total_variation
from mmspec.verifiers.enumeration import ancestral, distribution, enumerate_rounds, joint
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.grouped import Grouped
from mmspec.verifiers.likelihood_floor import LikelihoodFloor
from mmspec.verifiers.rank_limit import RankLimit
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.walk import one_hot
from tests.verifiers.drawn_distributions import by_prefix, distributions, vector

SIZE = 7
PAIRS = list(zip(*distributions(8, SIZE), strict=True))
Distributions = Callable[[tuple[int, ...]], Tensor | Categorical]


def close(found: Tensor, wanted: Tensor) -> None:
    assert_close(found, wanted, atol=1e-9, rtol=0)


def hard(distribution_: Callable[[tuple[int, ...]], Tensor]) -> Distributions:
    return lambda prefix: Categorical(distribution_(prefix).log(), hard=True)


def groups(*members: list[int], size: int = SIZE) -> Groups:
    pairs = sorted((token, at) for at, group in enumerate(members) for token in group)
    token, group = torch.tensor(pairs).unbind(1)
    return Groups(token, group, size, len(members))


OVERLAPPING = groups([0, 1, 2], [2, 3], [3, 4, 5], [0, 5], [6])
PARTITION = groups([0, 3], [1, 2, 4], [5, 6])
ALONE = groups(*([token] for token in range(SIZE)))


# Additive tolerance


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.4, 1.0])
def test_a_tolerance_is_off_by_what_its_formula_says(beta: float) -> None:
    for p, q in PAIRS:
        step = measure(AdditiveTolerance(beta), p, q)
        wanted = torch.minimum(beta * q, (q - p).clamp_min(0)).sum()
        close(step.distance, wanted)
        close(step.over_accepted, wanted)
        assert step.distance <= min(beta, float(total_variation(p, q))) + 1e-12
        extra = torch.minimum(beta * q, (q - p).clamp_min(0))
        formula = torch.minimum(p, q) + extra
        formula = formula + (1 - formula.sum()) * residual(p, q)
        close(step.output, formula)


def test_the_ends_of_the_tolerance_are_the_exact_rule_and_the_draft() -> None:
    for seed in range(3):
        p, q = by_prefix(seed), by_prefix(seed + 1000)
        found = joint(p, q, AdditiveTolerance(0), Tree.chain(3), Kind.IID)
        assert_close(found, ancestral(p, 4), atol=1e-12, rtol=0)
    for p, q in PAIRS:
        close(measure(AdditiveTolerance(1), p, q).output, q)


def test_no_tolerance_decides_as_the_exact_rule_under_the_same_noise() -> None:
    (p, q), batch = PAIRS[0], 64
    noise = KeyedNoise.seeded(3, batch, torch.device("cpu"))
    drawn = torch.stack([noise.pick(q.expand(batch, -1), lane) for lane in (70, 71, 72)], 1)
    draft = Draft.chain(drawn, Kind.IID, Categorical.having(q.expand(batch, 3, -1)))
    scores = Scores(Categorical.having(p.expand(batch, 4, -1)), torch.zeros(batch, 4).long())
    ours, exact = (
        Recursive(rule).verify(draft, scores, noise) for rule in (AdditiveTolerance(0), Exact())
    )
    assert torch.equal(ours.length, exact.length)
    assert ours.next is not None
    assert exact.next is not None
    assert torch.equal(ours.next, exact.next)
    assert 0 < int(exact.length.sum()) < 3 * batch


def test_control_codes_are_not_tolerated() -> None:
    for p, q in PAIRS:
        step = measure(AdditiveTolerance(0.3, exempt=(2, 4)), p, q)
        plain = measure(Exact(), p, q).accept
        assert torch.equal(step.accept[[2, 4]], plain[[2, 4]])
        extra = torch.minimum(0.3 * q, (q - p).clamp_min(0))
        extra[[2, 4]] = 0
        close(step.distance, extra.sum())
        assert step.output[2] <= p[2] + 1e-12  # never more often than the target says it
    p, q = vector(0.01, 0.99), vector(0.9, 0.1)  # an end that the draft hurries to
    assert measure(AdditiveTolerance(0.3), p, q).output[0] > 0.2
    assert_close(measure(AdditiveTolerance(0.3, (0,)), p, q).output, p)


@dataclass(frozen=True)
class CorrectedFromTarget(AdditiveTolerance):
    """Wrong: corrections from p, as if the rejection had told nothing."""

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


def test_a_tolerance_corrected_from_the_target_misses_the_formula() -> None:
    p, q = PAIRS[0]
    wanted = torch.minimum(0.1 * q, (q - p).clamp_min(0)).sum()
    assert float(measure(CorrectedFromTarget(0.1), p, q).distance - wanted) > 1e-3


def test_rounds_report_the_mass_that_was_accepted_too_often() -> None:
    """The mean of what the tests report is the distance of a step."""
    (p, q), batch = PAIRS[1], 20_000
    noise = KeyedNoise.seeded(5, batch, torch.device("cpu"))
    drawn = noise.pick(q.expand(batch, -1), Lane.DRAFT)[:, None]
    draft = Draft.chain(drawn, Kind.IID, Categorical.having(q.expand(batch, 1, -1)))
    scores = Scores(Categorical.having(p.expand(batch, 2, -1)), torch.zeros(batch, 2).long())
    verdict = Recursive(AdditiveTolerance(0.2)).verify(draft, scores, noise)
    assert verdict.excess is not None
    assert verdict.next is not None
    wanted = float(torch.minimum(0.2 * q, (q - p).clamp_min(0)).sum())
    error = float(verdict.excess.std()) / batch**0.5
    assert abs(float(verdict.excess.mean()) - wanted) < 4 * error
    said = torch.where(verdict.length > 0, drawn[:, 0], verdict.next)
    share, distribution_ = (
        said.bincount(minlength=SIZE) / batch,
        measure(AdditiveTolerance(0.2), p, q).output,
    )
    assert (
        (share - distribution_).abs() < 4.5 * (distribution_ * (1 - distribution_) / batch).sqrt()
    ).all()


# Rank


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
            found = joint(p, q, RankLimit(1), Tree.chain(2), kind)
            assert_close(found, ancestral(p, 3), atol=1e-12, rtol=0)
    p, q = PAIRS[2]
    close(measure(RankLimit(SIZE), p, q).output, q)
    sampled = measure(RankLimit(1), p, q)
    assert sampled.distance > 0.01  # sampled, one rank is not exact


# Likelihood


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
        found = joint(p, q, walk(LikelihoodFloor(0.51)), Tree.chain(3), Kind.DET)
        assert_close(found, ancestral(p, 4), atol=1e-12, rtol=0)


def test_a_lower_floor_is_not_greedy_decoding() -> None:
    p, q = Categorical(vector(0.55, 0.45).log(), hard=True), vector(0.1, 0.9)
    assert distribution(p, q, LikelihoodFloor(0.4), kind=Kind.DET).tolist() == [0, 1]
    assert distribution(p, q, LikelihoodFloor(0.51), kind=Kind.DET).tolist() == [1, 0]


@pytest.mark.parametrize("floor", [0.0, 0.3, 0.5, 0.8, 1.5])
def test_who_is_sure_is_not_asked(floor: float) -> None:
    for p, q in PAIRS:
        is_sure = bool(q.max() >= floor)
        step = measure(ConfidenceFloor(floor), p, q)
        assert step.accept.unique().tolist() == [float(is_sure)]
        close(step.output, q if is_sure else p)
        greedy = Categorical(q.log() + 3, hard=True)  # the distribution behind the point mass
        taken = distribution(p, greedy, ConfidenceFloor(floor), kind=Kind.IID)
        close(taken, greedy.probs if is_sure else p)


def test_starting_anew_forgets_what_was_accepted() -> None:
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


# Groups


def split(p: Tensor, table: Groups) -> Tensor:  # (V,) -> (V, G) p(x) w(g|x), by the definition
    weights = torch.zeros(table.vocabulary, table.count, dtype=p.dtype)
    for token, group in zip(table.token.tolist(), table.group.tolist(), strict=True):
        weights[token, group] = 1
    return p[:, None] * weights / weights.sum(1, keepdim=True)


@pytest.mark.parametrize("table", [OVERLAPPING, PARTITION, ALONE], ids=["over", "part", "alone"])
def test_the_distribution_of_the_group_is_the_target_s(table: Groups) -> None:
    """Token and group together, as the paper draws them: their group part is P, and the rule is it.

    On a partition the group can be told from the token, and the output itself has group
    distribution P.
    """
    for p, q in PAIRS:
        wanted, proposed = (split(one, table).sum(0) for one in (p, q))
        close(table.masses(p), wanted)
        passed = (wanted / proposed).clamp_max(1)
        kept = split(q, table) * passed
        left = residual(wanted, proposed)
        found = kept + (1 - kept.sum()) * left * split(p, table) / wanted
        close(found.sum(0), wanted)
        step = measure(CoarseGroups(table), p, q)
        close(step.output, found.sum(1))
        close(1 - step.rejected, torch.minimum(wanted, proposed).sum())
        if table is PARTITION:
            close(table.masses(step.output), wanted)


def test_groups_of_one_are_exact_and_one_of_all_is_the_draft() -> None:
    for seed in range(3):
        p, q = by_prefix(seed), by_prefix(seed + 1000)
        rule = CoarseGroups(groups([0], [1], [2], size=3))
        for kind in (Kind.IID, Kind.WOR, Kind.DET):
            found = joint(p, q, rule, Tree.chain(2), kind)
            assert_close(found, ancestral(p, 3), atol=1e-12, rtol=0)
    for p, q in PAIRS:
        close(measure(CoarseGroups(groups(list(range(SIZE)))), p, q).output, q)


def test_wider_groups_accept_at_least_as_often() -> None:
    book = Codebook.at(torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0)))
    merged = [ALONE, groups([0, 1], [2], [3], [4], [5], [6]), groups([0, 1, 2], [3], [4, 5, 6])]
    for p, q in PAIRS:
        rates = [float(1 - measure(CoarseGroups(table), p, q).rejected) for table in merged]
        assert rates == sorted(rates)
        alone = measure(CoarseGroups(Groups.near(book, 1.5)), p, q)
        close(alone.accept, measure(Exact(), p, q).accept)
        every = measure(CoarseGroups(Groups.near(book, -1)), p, q)
        close(every.output, q)


def test_groups_are_made_of_the_angle_between_vectors() -> None:
    angles = torch.tensor([0.0, 10.0, 20.0, 180.0]).deg2rad().double()
    vectors = torch.stack((angles.cos(), angles.sin()), 1) * torch.tensor([[1.0], [5], [1], [2]])
    book = Codebook(vectors, torch.tensor([1, 2, 3, 5]), 6)  # 0 and 4 are no codes
    table = Groups.near(book, 0.98)  # 11.5 degrees
    assert table.shares.tolist() == [1, 2, 3, 2, 1, 1]
    assert table.table.tolist()[2] == [1, 2, 3]
    assert table.table.tolist()[0] == [0, -1, -1]


def test_groups_with_token_corrections_miss_the_distribution_of_the_group() -> None:
    """GSD corrects from norm((p - q)+): right for tokens, not for groups."""

    class Partition:
        def masses(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            mine = PARTITION.table[x, 0]
            found = (PARTITION.masses(one).gather(-1, mine[..., None])[..., 0] for one in (p, q))
            return next(found), next(found)

    off = []
    for p, q in PAIRS:
        step = measure(Grouped(Partition()), p, q)
        off.append(float((PARTITION.masses(step.output) - PARTITION.masses(p)).abs().max()))
    assert max(off) > 0.01


def test_greedy_decoding_passes_what_shares_a_group_with_the_choice() -> None:
    p = Categorical(torch.arange(SIZE).double().flip(0), hard=True)  # says 0, in groups 0 and 3
    q = one_hot(torch.tensor(1), PAIRS[0][0])
    assert_close(measure(CoarseGroups(PARTITION), p, q).output, one_hot(torch.tensor(0), q))
    q = one_hot(torch.tensor(3), q)
    assert_close(measure(CoarseGroups(PARTITION), p, q).output, q)


# Bad settings


def test_bad_settings_are_refused() -> None:
    for make, says in (
        (lambda: AdditiveTolerance(-0.1), "beta is -0.1"),
        (lambda: AdditiveTolerance(2), "beta is 2"),
        (lambda: AdditiveTolerance(float("nan")), "beta is nan"),
        (lambda: RankLimit(0), "ranks=0"),
        (lambda: LikelihoodFloor(-1), "floor is -1"),
        (lambda: ConfidenceFloor(-1), "floor is -1"),
        (lambda: groups([0, 1], [3], size=4), "token 2 is in no group"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    with pytest.raises(ValueError, match=r"counts 7 token ids, but the target.s vocabulary has 9"):
        measure(CoarseGroups(PARTITION), distributions(1, 9)[0], distributions(1, 9)[1])
