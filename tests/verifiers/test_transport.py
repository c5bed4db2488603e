"""The optimum of optimal transport, and the two-step rule that reaches it for two drafts."""

from __future__ import annotations

from fractions import Fraction as F
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.bench.studies.rules import CONTENDERS, compare_rules, random_pairs
from mmspec.draft import Kind
from mmspec.verifiers.enumeration import enumerate_emitted, expected_accepted
from mmspec.verifiers.transport import acceptance_bound, sorted_bound
from mmspec.verifiers.two_step import TwoStep, choice_law, choice_weights
from tests.cli.running import run
from tests.verifiers.test_oracles import E

OPTIMA = {  # methods/foundations.md, section 1: subset formula and linear program agree
    (Kind.IID, 2): ("43/50", "19/25", "49/100"),
    (Kind.IID, 3): ("247/250", "871/1000", "571/1000"),
    (Kind.WOR, 2): ("69/70", "701/840", "83/140"),
    (Kind.WOR, 3): ("1", "1", "1"),
}


@pytest.mark.parametrize(("kind", "siblings"), OPTIMA, ids=str)
def test_the_optimum_is_as_in_the_table(kind: Kind, siblings: int) -> None:
    for name, value in zip(("E1", "E2", "E3"), OPTIMA[kind, siblings], strict=True):
        found = acceptance_bound(*E[name], siblings, kind)
        assert found == pytest.approx(float(F(value)), abs=1e-12)


def test_the_optimum_of_one_draft_is_one_minus_total_variation() -> None:
    for name, value in {"E1": "7/10", "E2": "11/20", "E3": "2/5", "E4": "7/10"}.items():
        for kind in (Kind.IID, Kind.WOR, Kind.HUB):
            assert acceptance_bound(*E[name], 1, kind) == pytest.approx(float(F(value)), abs=1e-12)


def test_sorted_prefixes_find_it_for_independent_drafts() -> None:
    for p, q in random_pairs(5, 40, 1.5, seed=1):
        for siblings in (1, 2, 3):
            found = acceptance_bound(p, q, siblings, Kind.IID)
            assert float(sorted_bound(p, q, siblings)) == pytest.approx(found, abs=1e-12)
    with pytest.raises(ValueError, match="20 tokens have too many sets"):
        acceptance_bound(torch.ones(20) / 20, torch.ones(20) / 20)


@pytest.mark.exhaustive
def test_no_rule_accepts_more_and_some_accept_as_much() -> None:
    for one, (p, q) in product(CONTENDERS, random_pairs(4, 10, 1.0, seed=2)):
        for siblings in range(1, min(one.most, 3) + 1):
            found = expected_accepted(p, q, one.verifier, siblings, one.kind)
            bound = acceptance_bound(p, q, siblings, one.kind)
            assert found <= bound + 1e-12
            if one.name == "top tokens":
                assert found == pytest.approx(bound, abs=1e-9)
            if one.name == "two-step":
                assert found > 0.98 * bound


def test_two_steps_reach_the_optimum_of_two_independent_drafts() -> None:
    for name, value in zip(("E1", "E2", "E3"), OPTIMA[Kind.IID, 2], strict=True):
        found = expected_accepted(*E[name], TwoStep(), 2, Kind.IID)
        assert found == pytest.approx(float(F(value)), abs=1e-12)


def test_the_law_of_the_choice_is_what_choosing_gives() -> None:
    for p, q in random_pairs(5, 20, 1.0, seed=3):
        order, weight = choice_weights(p[None], q[None])
        sorted_q = q[order[0]]
        law = torch.zeros(5).double()
        for i, j in product(range(5), repeat=2):
            pair, leader = float(sorted_q[i] * sorted_q[j]), min(i, j)
            law[leader] += pair * (1.0 if i == j else float(weight[0, leader]))
            law[max(i, j)] += 0.0 if i == j else pair * float(1 - weight[0, leader])
        assert_close(choice_law(sorted_q[None], weight)[0], law)


def test_testing_the_chosen_draft_against_q_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: the choice is forgotten, as if one draft had been drawn."""

    def forgotten(q: Tensor, weight: Tensor) -> Tensor:
        return q

    p, q = E["E2"]
    assert_close(enumerate_emitted(p, q, TwoStep(), 2, Kind.IID), p, atol=1e-12, rtol=0)
    monkeypatch.setattr("mmspec.verifiers.two_step.choice_law", forgotten)
    assert not torch.allclose(enumerate_emitted(p, q, TwoStep(), 2, Kind.IID), p, atol=0.01)


def test_the_command_shows_every_rule_beside_its_optimum(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = compare_rules(4, (1, 2), pairs=3)
    assert {one.siblings for one in table.points if one.rule == "two-step"} == {1, 2}
    assert all(one.accepted <= one.bound + 1e-12 for one in table.points)
    shown = run(capsys, "bench", "rules", "--vocabulary", "4", "--siblings", "1", "--pairs", "3")
    assert shown["points"] == [vars(one) for one in compare_rules(4, (1,), pairs=3).points]
