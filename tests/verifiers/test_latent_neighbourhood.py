"""LANTERN's pooling in closed form, and the corrections of its released code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.codes.codebook import Codebook
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.verifiers.distances import measure, total_variation
from mmspec.verifiers.enumeration import enumerate_emitted
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.grouped import Grouped, RankWindow
from mmspec.verifiers.latent_neighbourhood import (
    AdditiveBound,
    ClearedTarget,
    LatentNeighbourhood,
    Multiplicative,
    Optimal,
)
from mmspec.verifiers.neighbourhood_threshold import NeighbourhoodThreshold
from tests.verifiers.random_distributions import book, distributions, near, vector

RELEASED = [
    LatentNeighbourhood(
        Codebook.from_offset(
            torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
        ).neighbours(4),
        3,
        bound,
        ClearedTarget(),
    )
    for bound in (AdditiveBound(0.3), Multiplicative(3))
]


@pytest.mark.parametrize("bound", [AdditiveBound(0.25), Multiplicative(2.5)], ids=repr)
def test_pooling_takes_the_longest_run_of_nearest_codes_within_the_bound(
    bound: AdditiveBound | Multiplicative,
) -> None:
    table = near(12, 11)
    rule = LatentNeighbourhood(table, 6, bound)
    lengths = set()
    for p in distributions(8, 12)[0]:
        for x in range(12):
            most = bound.delta if isinstance(bound, AdditiveBound) else 1.5 * float(p[x])
            mass, run = 0.0, 0
            for y in table.near[x, :6].tolist():
                if mass + float(p[y]) > most:
                    break
                mass, run = mass + float(p[y]), run + 1
            pool = rule.pool(p, torch.tensor(x))
            assert int(pool.size) == run
            assert float(pool.mass) == pytest.approx(mass, abs=1e-15)
            lengths.add(run)
            moved = p.clone()
            moved[table.near[x, :run].long()] = 0
            moved[x] += mass
            assert float(total_variation(moved, p)) == pytest.approx(mass, abs=1e-15)
    assert len(lengths) > 3


def test_a_bound_that_is_reached_is_kept() -> None:
    p = vector(0.25, 0.25, 0.25, 0.25)
    for bound in (AdditiveBound(0.25), Multiplicative(2.0)):
        pool = LatentNeighbourhood(LINE, 3, bound).pool(p, torch.tensor(1))
        assert (int(pool.size), float(pool.mass)) == (1, 0.25)


def test_the_distance_has_the_closed_form_and_exceeds_delta() -> None:
    p, q = distributions(60, 12, seed=1)
    x = torch.arange(12).expand(60, -1)
    beyond = 0
    for bound in (AdditiveBound(0.1), Multiplicative(3)):
        rule = LatentNeighbourhood(near(12, 11), 8, bound)
        mass = rule.pool(p[:, None].expand(-1, 12, -1), x).mass
        wanted = torch.minimum((q - p).clamp_min(0), mass).sum(-1)
        assert_close(measure(rule, p, q).distance, wanted, atol=1e-14, rtol=0)
        beyond += int((wanted > 0.1).sum()) if isinstance(bound, AdditiveBound) else 0
    assert beyond > 10  # delta bounds the move of p for one token, not the output


def test_the_multiplicative_bound_is_the_safer_one() -> None:
    """V = 64, k = 10: additive 0.1 against a factor of 3."""
    p, q = distributions(100, 64)
    off = [
        float(measure(LatentNeighbourhood(near(64, 10), 10, bound), p, q).distance.mean())
        for bound in (AdditiveBound(0.1), Multiplicative(3))
    ]
    everything = float(total_variation(p, q).mean())
    assert off[0] > 0.6 * everything
    assert off[1] < 0.2 * everything


def test_mass_grows_with_delta_and_with_k() -> None:
    p, _ = distributions(20, 12)
    x = torch.arange(12).expand(20, -1)
    every = p[:, None].expand(-1, 12, -1)

    def mass(k: int, delta: float) -> Tensor:
        return LatentNeighbourhood(near(12, 11), k, AdditiveBound(delta)).pool(every, x).mass

    for low, high in ((0.05, 0.1), (0.1, 0.5), (0.5, 1.0)):
        assert (mass(6, low) <= mass(6, high)).all()
        assert (mass(6, low) < mass(6, high)).any()
    for few, many in ((1, 2), (2, 11)):
        assert (mass(few, 0.4) <= mass(many, 0.4)).all()
        assert (mass(few, 0.4) < mass(many, 0.4)).any()


def test_a_factor_bounds_the_acceptance_and_keeps_the_support() -> None:
    p, q = distributions(30, 12)
    p = p.masked_fill(p < p.median(-1, keepdim=True).values, 0)
    p = p / p.sum(-1, keepdim=True)
    vanilla = (p / q).clamp_max(1)
    factor = measure(LatentNeighbourhood(near(12, 11), 11, Multiplicative(3)), p, q)
    assert (factor.accept <= (3 * vanilla).clamp_max(1) + 1e-15).all()
    assert (factor.accept > vanilla + 1e-3).any()
    assert not factor.output[p == 0].any()
    added = measure(LatentNeighbourhood(near(12, 11), 11, AdditiveBound(0.2)), p, q)
    assert added.output[p == 0].max() > 0.01  # LANTERN emits what the target rules out


def test_duplicate_codes_count_as_one() -> None:
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, 0)
    rule = LatentNeighbourhood(Codebook.from_offset(rows).neighbours(1), 1, AdditiveBound(1))
    p, q = distributions(5, 4)
    parts = torch.rand(5, 8, generator=torch.Generator().manual_seed(1)).double()
    parts = parts / parts.reshape(5, 4, 2).sum(-1).repeat_interleave(2, 1)
    split = p.repeat_interleave(2, 1) * parts
    first = torch.zeros(5, 8).double()
    first[:, ::2] = q  # the drafter knows one code of each pair
    merged = measure(Exact(), p, q).accept
    assert_close(measure(rule, split, first).accept[:, ::2], merged, atol=1e-12, rtol=0)


def test_a_permuted_codebook_permutes_the_output() -> None:
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    rows, (p, q) = book(9).vectors, distributions(4, 9)
    plain = LatentNeighbourhood(Codebook.from_offset(rows).neighbours(5), 4, AdditiveBound(0.2))
    moved = replace(plain, table=Codebook.from_offset(rows[order]).neighbours(5))
    ids = Codebook(rows, order.argsort(), 9)  # the same move, told by token ids
    for rule in (moved, replace(plain, table=ids.neighbours(5))):
        found = measure(rule, p[:, order], q[:, order]).output
        assert_close(found, measure(plain, p, q).output[:, order], atol=1e-14, rtol=0)


def test_tokens_that_are_no_codes_are_verified_exactly() -> None:
    table = Codebook.from_offset(book(5).vectors, offset=2, vocabulary=9).neighbours(4)
    p, q = distributions(6, 9)
    text = torch.tensor([0, 1, 7, 8])
    exact = measure(Exact(), p, q).accept
    for bound in (AdditiveBound(0.5), Multiplicative(4)):
        found = measure(LatentNeighbourhood(table, 3, bound), p, q).accept
        assert torch.equal(found[:, text], exact[:, text])
        assert (found > exact).any()
    kept = measure(NeighbourhoodThreshold(table, 4, 0.3), p, q).accept
    assert torch.equal(kept[:, text], (p[:, text] >= 0.3).double())
    window = RankWindow(5, codebook=Codebook.from_offset(book(5).vectors, 2, 9), distance=100.0)
    assert torch.equal(measure(Grouped(window), p, q).accept[:, text], exact[:, text])


# The residuals of the released code, on codes 0, 1, 2.5 and 10: the neighbours of 1 are 0, 2, 3

LINE = Codebook.from_offset(torch.tensor([[0.0], [1.0], [2.5], [10.0]])).neighbours(3)
P, Q = vector(0.10, 0.10, 0.55, 0.25), vector(0.05, 0.70, 0.10, 0.15)


def test_the_released_residual_is_not_the_best() -> None:
    """Token 1 is accepted with 0.2 / 0.7 (it pools token 0), so E = 0.1 and half is corrected."""
    best = LatentNeighbourhood(LINE, 1, AdditiveBound(0.1))
    step = measure(best, P, Q)
    assert_close(step.over_accepted, vector(0.1)[0])
    assert_close(step.distance, vector(0.1)[0])
    target = enumerate_emitted(P, Q, replace(best, correction=ClearedTarget()), kind=Kind.IID)
    assert_close(target, vector(0.05, 0.20, 0.10, 0.65), atol=1e-12, rtol=0)  # tokens 0 and 2 gone
    assert float(total_variation(target, P)) == pytest.approx(0.5)


def test_the_dynamic_tree_s_residual_clears_the_neighbours_of_a_chosen_token() -> None:
    rule = LatentNeighbourhood(LINE, 1, AdditiveBound(0.1), ClearedTarget())
    found = enumerate_emitted(P, Categorical(Q.log(), hard=True), rule, kind=Kind.DET)
    assert_close(found, vector(0, 0.2, 0, 0.8), atol=1e-12, rtol=0)
    best = enumerate_emitted(
        P, Categorical(Q.log(), hard=True), replace(rule, correction=Optimal())
    )
    assert_close(best, 0.8 * vector(0.10, 0, 0.55, 0.25) / 0.9 + vector(0, 0.2, 0, 0))


def test_the_released_residual_is_biased_even_where_nothing_is_pooled() -> None:
    """A neighbour of no mass fits every bound, and then its whole neighbourhood is cleared."""
    p, q = vector(0, 0.4, 0.4, 0.2), vector(0.1, 0.6, 0.2, 0.1)
    exact = LatentNeighbourhood(LINE, 1, AdditiveBound(0))
    assert_close(enumerate_emitted(p, q, exact, kind=Kind.IID), p, atol=1e-12, rtol=0)
    biased = enumerate_emitted(p, q, replace(exact, correction=ClearedTarget()), kind=Kind.IID)
    assert float(total_variation(biased, p)) > 0.01


@pytest.mark.parametrize("rule", RELEASED, ids=repr)
def test_the_released_residuals_are_further_off_than_the_optimum(
    rule: LatentNeighbourhood,
) -> None:
    further = 0
    for p, q in zip(*distributions(30, 7), strict=True):
        step = measure(rule, p, q)
        best = measure(replace(rule, correction=Optimal()), p, q)
        assert_close(step.over_accepted, best.over_accepted)
        assert step.distance >= best.distance - 1e-14
        further += bool(step.distance > best.distance + 1e-3)
    assert further > 5


def test_the_released_residual_clears_nothing_where_nothing_fits() -> None:
    """Every nearest code has a mass of 0.1 or more."""
    best = LatentNeighbourhood(LINE, 1, AdditiveBound(0.05))
    released = replace(best, correction=ClearedTarget())
    found = enumerate_emitted(P, Q, released, kind=Kind.IID)
    assert_close(found, enumerate_emitted(P, Q, best, kind=Kind.IID), atol=1e-12, rtol=0)
    assert_close(found, P, atol=1e-12, rtol=0)


def test_a_residual_of_nothing_falls_back_to_the_target() -> None:
    rule = LatentNeighbourhood(LINE, 3, AdditiveBound(1), ClearedTarget())
    p, q = Categorical.from_probs(P), Categorical.from_probs(Q)
    assert_close(rule.residual(p, q, torch.tensor(1)).probs, P)  # all but 1 go, and q has more of 1
