"""Properties of every rule of the list, lossless or lossy, and of an unlisted one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind, Rule, RuleSchedule
from mmspec.trees import Tree
from mmspec.verifiers.distances import measure
from mmspec.verifiers.enumeration import ancestral_joint, enumerate_emitted, enumerate_joint
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.walk import rule_at_depth
from tests.covering import covering
from tests.verifiers.parts import RULES
from tests.verifiers.tolerance import Tolerance

LISTED: tuple[Rule | RuleSchedule, ...] = (*RULES, Tolerance(bins=1))
SIZE = 5


def distributions(*batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    scores = torch.randn(2, *batch, SIZE, generator=torch.Generator().manual_seed(seed)).double()
    p, q = (1.5 * scores).softmax(-1)
    return p, q


@pytest.mark.parametrize("hard", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("rule", LISTED, ids=repr)
def test_acceptances_are_probabilities_and_corrections_distributions(
    rule: Rule | RuleSchedule, hard: bool
) -> None:
    p, q = distributions(2, 3)
    target, draft = Categorical(p.log(), hard), Categorical.from_probs(q)
    x = torch.arange(6).view(2, 3) % SIZE
    single = rule_at_depth(rule, torch.arange(3), 3)
    accept, left = single.accept(target, draft, x), single.residual(target, draft, x)
    assert accept.shape == left.batch == (2, 3)
    assert bool(((accept >= 0) & (accept <= 1)).all())
    assert bool((left.probs >= 0).all())
    assert_close(left.probs.sum(-1), torch.ones(2, 3).double())


@pytest.mark.parametrize(("hard", "rule"), covering([False, True], LISTED, strength=1), ids=str)
def test_one_step_does_what_enumeration_finds(rule: Rule | RuleSchedule, hard: bool) -> None:
    single = rule_at_depth(rule, 0, 1)
    for p, q in zip(*distributions(6), strict=True):
        target = Categorical(p.log(), hard)
        step = measure(single, target, q)
        assert_close(
            step.output, enumerate_emitted(target, q, single, kind=Kind.IID), atol=1e-12, rtol=0
        )
        assert step.distance >= step.over_accepted - 1e-14


@pytest.mark.parametrize("tree", [Tree.chain(2), Tree.branching([2, 1])], ids=str)
@pytest.mark.parametrize("rule", [rule for rule in LISTED if rule.lossless], ids=repr)
def test_a_lossless_rule_gives_back_the_target_s_distribution(
    rule: Rule | RuleSchedule, tree: Tree
) -> None:
    for p, q in zip(*distributions(4, seed=1), strict=True):
        for kind in (Kind.IID, Kind.WOR, Kind.DET):
            found = enumerate_joint(p, q, Recursive(rule), tree, kind)
            assert_close(found, ancestral_joint(p, tree.depth + 1), atol=1e-12, rtol=0)


def test_the_rule_of_the_style_guide() -> None:
    p, q = distributions()
    wide = measure(Tolerance(SIZE), p, q)
    assert_close(wide.output, q)
    greedy = Categorical(p.log(), hard=True)
    assert_close(
        enumerate_emitted(greedy, q, Tolerance(0), 2, Kind.WOR), greedy.probs, atol=1e-12, rtol=0
    )
    near = measure(Tolerance(1), greedy, q)
    assert near.accept.nonzero().flatten().sub(greedy.mode).abs().max() == 1
    assert near.distance > 0.01
