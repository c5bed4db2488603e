"""Additive tolerance: the distance follows its formula, and both limits are known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical, residual
from mmspec.distributions.noise import KeyedNoise, Lane
from mmspec.draft import Draft, Kind, Scores
from mmspec.trees import Tree
from mmspec.verifiers.additive_tolerance import AdditiveTolerance
from mmspec.verifiers.distances import measure, total_variation
from mmspec.verifiers.enumeration import (
    ancestral_joint,
    enumerate_joint,
)
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.recursive import Recursive
from tests.verifiers.random_distributions import by_prefix, vector
from tests.verifiers.test_coarse_groups import PAIRS, SIZE, close


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.4, 1.0])
def test_the_distance_of_a_tolerance_follows_its_formula(beta: float) -> None:
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
        found = enumerate_joint(p, q, AdditiveTolerance(0), Tree.chain(3), Kind.IID)
        assert_close(found, ancestral_joint(p, 4), atol=1e-12, rtol=0)
    for p, q in PAIRS:
        close(measure(AdditiveTolerance(1), p, q).output, q)


def test_no_tolerance_decides_as_the_exact_rule_under_the_same_noise() -> None:
    (p, q), batch = PAIRS[0], 64
    noise = KeyedNoise.from_seed(3, batch, torch.device("cpu"))
    drawn = torch.stack([noise.pick(q.expand(batch, -1), lane) for lane in (70, 71, 72)], 1)
    draft = Draft.chain(drawn, Kind.IID, Categorical.from_probs(q.expand(batch, 3, -1)))
    scores = Scores(Categorical.from_probs(p.expand(batch, 4, -1)), torch.zeros(batch, 4).long())
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
    """Wrong: corrects from p instead of the residual."""

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


def test_a_tolerance_corrected_from_the_target_misses_the_formula() -> None:
    p, q = PAIRS[0]
    wanted = torch.minimum(0.1 * q, (q - p).clamp_min(0)).sum()
    assert float(measure(CorrectedFromTarget(0.1), p, q).distance - wanted) > 1e-3


def test_rounds_report_the_mass_that_was_accepted_too_often() -> None:
    """The mean of what the tests report is the distance of a step."""
    (p, q), batch = PAIRS[1], 20_000
    noise = KeyedNoise.from_seed(5, batch, torch.device("cpu"))
    drawn = noise.pick(q.expand(batch, -1), Lane.DRAFT)[:, None]
    draft = Draft.chain(drawn, Kind.IID, Categorical.from_probs(q.expand(batch, 1, -1)))
    scores = Scores(Categorical.from_probs(p.expand(batch, 2, -1)), torch.zeros(batch, 2).long())
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
