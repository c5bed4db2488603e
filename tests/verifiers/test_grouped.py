"""Grouped speculative decoding: windows of rank and partitions as groups."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.testing import assert_close

from mmspec.codes.codebook import Codebook
from mmspec.distributions.categorical import Categorical
from mmspec.verifiers.distances import measure, total_variation
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.grouped import Embeddings, Grouped, RankWindow
from mmspec.verifiers.walk import one_hot
from tests.verifiers.random_distributions import distributions, vector
from tests.verifiers.test_relaxed import Partition


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
    codes = Codebook.from_offset(vector(0, 0, 0.9, 0.1, 0, 0, 0.6)[:, None])
    close = RankWindow(4, gap=1.0, codebook=codes, distance=0.5).masses(p, q, torch.tensor(5))
    assert_close(torch.stack(close), torch.stack([p[[6, 5, 3]].sum(), q[[6, 5, 3]].sum()]))


def test_what_is_as_far_as_the_bound_is_outside_a_window() -> None:
    p, q = vector(0.5, 0.25, 0.25), vector(0.25, 0.25, 0.5)
    x = torch.tensor(0)
    own = torch.stack((p[0], q[0]))
    assert_close(torch.stack(RankWindow(4, gap=0.25).masses(p, q, x)), own)
    codes = Codebook.from_offset(vector(0, 0.5, 4)[:, None])  # 0.25 apart, squared
    bounded = RankWindow(4, gap=1.0, codebook=codes, distance=0.25)
    assert_close(torch.stack(bounded.masses(p, q, x)), own)
    wider = replace(bounded, distance=0.26).masses(p, q, x)
    assert_close(torch.stack(wider), own + 0.25)


def test_a_window_of_no_others_is_speculative_sampling() -> None:
    p, q = distributions(5, 7)
    for size in (0, 1):
        found = measure(Grouped(RankWindow(size, gap=1.0)), p, q)
        assert_close(found.accept, measure(Exact(), p, q).accept)
        assert_close(found.output, p, atol=1e-14, rtol=0)


def test_corrections_are_drawn_from_the_residual() -> None:
    """Also where a token was accepted more or less often than by speculative sampling."""
    p, q = vector(0.6, 0.3, 0.1), vector(0.2, 0.3, 0.5)
    found = Grouped(RankWindow(3, gap=1.0)).residual(
        Categorical.from_probs(p), Categorical.from_probs(q), torch.tensor(2)
    )
    assert_close(found.probs, vector(1, 0, 0))


def test_rows_of_an_embedding_are_compared_where_both_tokens_are_codes() -> None:
    table = torch.tensor([[0.0, 0], [3, 4], [0, 1], [0, 0]])
    space = Embeddings(lambda ids: table[ids], torch.tensor([0, 1, 2, -1]))
    x, y = torch.tensor([[0], [1], [3]]), torch.tensor([[0, 1, 2, 3]])
    none = float("inf")
    expected = [[0, 25, 1, none], [25, 0, 18, none], [none] * 4]
    assert space.squared_distance(x, y).tolist() == expected


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
