"""Relaxed rules with a closed form: what they emit, and the bias that they report."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction as F
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores
from mmspec.drafters.lengths.length import Confidence
from mmspec.verifiers.cascade import Cascade, Chow, Difference, OptimalDeferral, TokenCascade
from mmspec.verifiers.distances import ClosedForm, measure, total_variation
from mmspec.verifiers.ensemble import WeightedEnsemble
from mmspec.verifiers.enumeration import enumerate_emitted, expected_accepted
from mmspec.verifiers.fuzzy import Fuzzy, jensen_shannon, kullback_leibler
from mmspec.verifiers.likelihood_floor import LikelihoodFloor
from mmspec.verifiers.rank_gap import RankGap
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.rollback import Rollback
from tests import toys
from tests.partners import noisy
from tests.verifiers.parts import RULES
from tests.verifiers.test_oracles import E, vector
from tests.verifiers.test_rules import distributions

CLOSED = [rule for rule in RULES if isinstance(rule, ClosedForm)]
RECIPES = ("bild", "cascade", "consultant", "ensemble", "fuzzy", "specdec")


@pytest.mark.parametrize("hard", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("rule", [*CLOSED, LikelihoodFloor(0.2, unchecked=(1,))], ids=repr)
def test_the_closed_form_is_the_distance(rule: ClosedForm, hard: bool) -> None:
    p, q = distributions(40, seed=3)
    target, draft = Categorical(p.log(), hard), Categorical.from_probs(q)
    found = rule.bias(target, draft)
    assert_close(found, measure(rule, target, draft).distance, atol=1e-12, rtol=0)  # type: ignore[arg-type]
    assert float(found.max()) > 0.01


def test_every_new_rule_has_a_closed_form() -> None:
    kinds = {type(rule) for rule in CLOSED}
    assert kinds >= {WeightedEnsemble, Cascade, TokenCascade, Fuzzy, RankGap, Rollback}


@pytest.mark.parametrize("rule", CLOSED, ids=repr)
def test_a_run_reports_the_sum_over_the_tested_tokens(rule: ClosedForm) -> None:
    p, q = distributions(3, 5, seed=4)
    x = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [1, 1, 2, 0]])
    scores = Scores(Categorical.from_probs(p), torch.arange(5).expand(3, -1))
    drafted = Categorical.from_probs(q[:, :4])
    draft = Draft.chain(x, Kind.IID, drafted)
    verdict = Recursive(rule).verify(draft, scores, KeyedNoise.from_seed(0, 3, p.device))  # type: ignore[arg-type]
    each = rule.bias(Categorical.from_probs(p[:, :4]), drafted)
    tested = torch.arange(4) <= verdict.length[:, None]
    assert verdict.excess is not None
    assert_close(verdict.excess, (each * tested).sum(1))


@dataclass(frozen=True)
class FromTarget(WeightedEnsemble):
    """The wrong variant: corrections from p, in place of the residual of the mixture."""

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


def test_an_ensemble_emits_the_mixture() -> None:
    p, q = E["E1"]
    assert expected_accepted(p, q, WeightedEnsemble(0.5)) == pytest.approx(17 / 20, abs=1e-12)
    mixture = vector("7/20", "2/5", "1/4")
    assert_close(enumerate_emitted(p, q, WeightedEnsemble(0.5)), mixture, atol=1e-12, rtol=0)
    assert not torch.allclose(enumerate_emitted(p, q, FromTarget(0.5)), mixture)
    assert_close(enumerate_emitted(p, q, WeightedEnsemble(1.0)), p, atol=1e-12, rtol=0)
    assert_close(enumerate_emitted(p, q, WeightedEnsemble(0.0)), q, atol=1e-12, rtol=0)
    assert expected_accepted(p, q, WeightedEnsemble(0.0)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("deferral", "defers"),
    [
        (Chow(0.6), False),  # max q = 0.5 is no less than 0.4
        (Chow(0.4), True),
        (Difference(0.0), False),  # 0.5 is no less than 0.5
        (Difference(-0.1), True),
        (OptimalDeferral(0.0), False),
        (OptimalDeferral(-1.0), True),  # 0.5 < 0.5 + 3/10
    ],
    ids=repr,
)
def test_a_cascade_emits_one_of_the_two(
    deferral: Chow | Difference | OptimalDeferral, defers: bool
) -> None:
    p, q = E["E1"]
    found = enumerate_emitted(p, q, Cascade(deferral))
    assert_close(found, p if defers else q, atol=1e-12, rtol=0)


def test_the_cascade_of_tokens_keeps_those_near_the_best() -> None:
    p, q = E["E1"]  # T = {0}: q(T) = 1/5
    found = enumerate_emitted(p, q, TokenCascade(0.3))
    share = F(4, 5)
    values = [F(1, 5) + share / 2, share * F(3, 10), share * F(1, 5)]
    assert_close(found, vector(*values), atol=1e-12, rtol=0)
    greedy = Categorical(p.log(), hard=True)
    assert_close(enumerate_emitted(greedy, q, TokenCascade(0.0)), greedy.probs, atol=1e-12, rtol=0)


def test_fuzzy_keeps_whole_positions() -> None:
    p, q = E["E1"]
    near = float(jensen_shannon(p, q))
    assert_close(enumerate_emitted(p, q, Fuzzy(near + 1e-9)), q, atol=1e-12, rtol=0)
    assert_close(enumerate_emitted(p, q, Fuzzy(near - 1e-9)), p, atol=1e-12, rtol=0)
    assert_close(enumerate_emitted(p, q, Fuzzy(float("inf"))), q, atol=1e-12, rtol=0)
    many, others = distributions(200, seed=5)
    bound = (2 * jensen_shannon(many, others)).sqrt()
    assert bool((total_variation(many, others) <= bound).all())
    zero = torch.tensor([1.0, 0.0])
    assert float(kullback_leibler(zero, zero.flip(0))) == float("inf")
    assert float(kullback_leibler(zero, zero)) == 0


def test_ranks_gaps_and_surprise() -> None:
    p = Categorical(torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log())
    x, q = torch.arange(5), Categorical(torch.zeros(5, 5))
    wide = Categorical(p.scores.expand(5, 5))
    assert RankGap(2, 9.0).accept(wide, q, x).tolist() == [1, 1, 0, 0, 0]
    assert RankGap(9, 1.0).accept(wide, q, x).tolist() == [1, 1, 0, 0, 0]  # log 5/3 < 1 < log 10/3
    assert RankGap(9, float("inf")).accept(wide, q, x).tolist() == [1, 1, 1, 1, 0]
    assert RankGap(3).residual(wide, q, x).mode.tolist() == [0] * 5
    assert Rollback(1.0).accept(wide, q, x).tolist() == [1, 0, 0, 0, 0]
    assert Rollback(0.1).accept(wide, q, x).tolist() == [1, 0, 0, 0, 0]  # the best one stays
    assert Rollback(2.0).accept(wide, q, x).tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reports_its_bias(name: str) -> None:
    model = toys.model("llama")
    parts: dict[str, Any] = {"length": Confidence(0.01, 5)} if name == "bild" else {}
    fast = mmspec.accelerate(model, name, drafter=noisy("llama", scale=0.3), **parts)
    request = toys.inputs("llama", batch=2, ragged=True)
    found = fast.generate(**request, max_new_tokens=16, temperature=1.0, seed=2).stats
    assert found.fallback is None
    assert found.exact is False
    assert found.over_accepted_mass is not None
    assert found.over_accepted_mass > 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ensemble", {"weight": 1.5}, "weight=1.5 must be a number of at least 0 and at most 1"),
        ("cascade", {"deferral": "opt"}, "deferral='opt' is not known; choose one of token, chow"),
        ("cascade", {"alpha": 2}, "alpha=2 must be a number"),
        ("fuzzy", {"divergence": "l2"}, "divergence='l2' is not known; choose one of js, kl, tv"),
        ("fuzzy", {"threshold": float("nan")}, "threshold=nan must be a number"),
        ("bild", {"rollback": -1}, "limit=-1 must be a number of at least 0"),
        ("specdec", {"ranks": 0}, "ranks=0 must be a whole number of at least 1"),
        ("specdec", {"gap": -0.1}, "gap=-0.1 must be a number of at least 0"),
        ("consultant", {"surprise": -1}, "surprise=-1 must be a number of at least 0"),
    ],
)
def test_what_makes_no_rule_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(toys.model("llama"), name, drafter=toys.model("llama"), **options)
