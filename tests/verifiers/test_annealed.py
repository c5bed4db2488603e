"""Annealed rules: weights fall with depth, keep their mean, and wrap any rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Rule, Scores, Verdict, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.annealed import Annealed, WeightedRule
from mmspec.verifiers.distances import measure, total_variation
from mmspec.verifiers.enumeration import (
    ancestral_joint,
    enumerate_rounds,
)
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.latent_neighbourhood import (
    LatentNeighbourhood,
    Multiplicative,
)
from mmspec.verifiers.recursive import Recursive
from tests.verifiers.random_distributions import distributions, near, vector
from tests.verifiers.test_relaxed import KINDS


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


def test_a_step_over_accepts_as_its_formula_predicts() -> None:
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
            rule = DepthWeights(vector(*weights))
            found = enumerate_rounds(p, q, Recursive(rule), Tree.chain(2), Kind.IID)
            off.append(
                float(total_variation(found.joint.flatten(), ancestral_joint(p, 3).flatten()))
            )
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
class DepthWeights:
    """A weight per depth, as given."""

    weights: Tensor
    lossless: ClassVar[bool] = False

    def at(self, depth: Tensor | int, longest: int) -> Rule:
        return WeightedRule(Exact(), self.weights[depth])


@dataclass(frozen=True)
class Ragged(Verifier):
    """A verifier that does not know that all rows share one topology."""

    verifier: Recursive
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = tuple(KINDS)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        return self.verifier.verify(replace(draft, tree=None), scores, noise)
