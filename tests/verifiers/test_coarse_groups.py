"""Coarse groups: the distribution of the group is the target's, and both limits are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.codes.codebook import Codebook
from mmspec.distributions.categorical import Categorical, residual
from mmspec.draft import Kind
from mmspec.trees import Tree
from mmspec.verifiers.additive_tolerance import AdditiveTolerance
from mmspec.verifiers.coarse_groups import CoarseGroups, Groups
from mmspec.verifiers.confidence_floor import ConfidenceFloor
from mmspec.verifiers.distances import measure
from mmspec.verifiers.enumeration import (
    ancestral_joint,
    enumerate_joint,
)
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.grouped import Grouped
from mmspec.verifiers.likelihood_floor import LikelihoodFloor
from mmspec.verifiers.rank_limit import RankLimit
from mmspec.verifiers.walk import one_hot
from tests.verifiers.random_distributions import by_prefix, distributions

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
            found = enumerate_joint(p, q, rule, Tree.chain(2), kind)
            assert_close(found, ancestral_joint(p, 3), atol=1e-12, rtol=0)
    for p, q in PAIRS:
        close(measure(CoarseGroups(groups(list(range(SIZE)))), p, q).output, q)
    lossless = [CoarseGroups(table).lossless for table in (ALONE, PARTITION, OVERLAPPING)]
    assert lossless == [True, False, False]
    assert not CoarseGroups(groups([0, 1], [2], size=3)).lossless


def test_wider_groups_accept_at_least_as_often() -> None:
    book = Codebook.from_offset(torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0)))
    merged = [ALONE, groups([0, 1], [2], [3], [4], [5], [6]), groups([0, 1, 2], [3], [4, 5, 6])]
    for p, q in PAIRS:
        rates = [float(1 - measure(CoarseGroups(table), p, q).rejected) for table in merged]
        assert rates == sorted(rates)
        alone = measure(CoarseGroups(Groups.around_codes(book, 1.5)), p, q)
        close(alone.accept, measure(Exact(), p, q).accept)
        every = measure(CoarseGroups(Groups.around_codes(book, -1)), p, q)
        close(every.output, q)


def test_groups_are_made_of_the_angle_between_vectors() -> None:
    angles = torch.tensor([0.0, 10.0, 20.0, 180.0]).deg2rad().double()
    vectors = torch.stack((angles.cos(), angles.sin()), 1) * torch.tensor([[1.0], [5], [1], [2]])
    book = Codebook(vectors, torch.tensor([1, 2, 3, 5]), 6)  # 0 and 4 are no codes
    table = Groups.around_codes(book, 0.98)  # 11.5 degrees
    assert table.shares.tolist() == [1, 2, 3, 2, 1, 1]
    assert table.table.tolist()[2] == [1, 2, 3]
    assert table.table.tolist()[0] == [0, -1, -1]


def test_a_code_at_the_threshold_is_in_the_group() -> None:
    """The cosine of opposite codes is -1 despite rounding."""
    square = Codebook.from_offset(torch.tensor([[1.0, 0], [0, 1], [-1, 0]]))
    assert Groups.around_codes(square, -1).shares.tolist() == [3, 3, 3]
    assert Groups.around_codes(square, -0.5).shares.tolist() == [2, 3, 2]
    for seed in range(40):
        vectors = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        every = Groups.around_codes(Codebook.from_offset(torch.cat((vectors, -vectors))), -1)
        assert every.shares.tolist() == [10] * 10


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
