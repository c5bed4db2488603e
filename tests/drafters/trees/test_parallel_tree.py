"""The most probable paths of independent heads: the best of all paths, and exact output."""

from __future__ import annotations

from itertools import product
from math import log, prod

import pytest
import torch

import mmspec
from mmspec.drafters.neural.multi_token import MEDUSA_HEADS
from mmspec.drafters.trees.parallel_tree import ParallelTree, best_paths
from mmspec.models.heads.medusa import MedusaHeads
from tests import toys
from tests.drafters.heads import untrained_head
from tests.toys.readers import backbone


def test_the_likeliest_paths_are_the_best_of_all() -> None:
    """By listing every path; parents come before their children, and all that there are suffice."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        distributions = (
            torch.rand(4, 3, generator=generator).softmax(-1).sort(-1, descending=True).values
        )
        chances = distributions.double().tolist()
        every = {
            path: prod(chances[depth][rank] for depth, rank in enumerate(path))
            for length in range(1, 5)
            for path in product(range(3), repeat=length)
        }
        scores = [[log(one) for one in row] for row in chances]
        for nodes in (1, 7, 30, 500):
            found = best_paths(scores, nodes)
            best = sorted(every.values(), reverse=True)[:nodes]
            assert sorted((every[path] for path in found), reverse=True) == pytest.approx(best)
            assert len(set(found)) == len(found) == min(nodes, len(every))
            assert all(len(p) == 1 or p[:-1] in found[:at] for at, p in enumerate(found))
    shown = [[log(0.6), log(0.4)], [log(0.7), log(0.3)]]
    assert best_paths(shown, 4) == [(0,), (0, 0), (1,), (1, 0)]
    assert best_paths([[0.0, -torch.inf]] * 2, 9) == [(0,), (0, 0)]  # what cannot be is no node


@pytest.fixture(scope="module")
def heads() -> MedusaHeads:
    found: MedusaHeads = MEDUSA_HEADS.random(backbone(toys.model("llava")), 0)
    return found


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_output_is_the_targets(heads: MedusaHeads, sampled: bool) -> None:
    """Three rows of different length, by Medusa's heads."""
    model = toys.model("llava")
    given = toys.inputs("llava", batch=3, ragged=True)
    said = {"do_sample": sampled, "temperature": 0.9} if sampled else {"do_sample": False}
    wanted = mmspec.accelerate(model, "plain").generate(**given, **said, max_new_tokens=14, seed=5)
    for tree in ("parallel", ParallelTree(nodes=9, depth=3, branch=2), ParallelTree(nodes=1)):
        fast = mmspec.accelerate(model, "medusa", drafter=heads, tree=tree)
        found = fast.generate(**given, **said, max_new_tokens=14, seed=5)
        assert found.sequences.tolist() == wanted.sequences.tolist()
        assert found.stats.num_draft_tokens > 0


def test_one_child_each_is_the_chain(heads: MedusaHeads) -> None:
    """Kept token for kept token, with the target's own noise at the place of every depth."""
    model = toys.model("llava")
    given = toys.inputs("llava", batch=3, ragged=True)
    said = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 48, "seed": 5}
    shapes = {"tree": ParallelTree(nodes=4, depth=4, branch=1)}, {"length": 4}
    tree, chain = (
        mmspec.accelerate(model, "medusa", drafter=heads, **shape).generate(**given, **said)
        for shape in shapes
    )
    assert tree.stats.acceptance_histogram == chain.stats.acceptance_histogram
    assert sum(chain.stats.acceptance_histogram[2:]) > 0  # at more than one depth


def test_a_head_that_hears_its_draft_is_refused() -> None:
    model = toys.model("llava")
    with pytest.raises(ValueError, match="FeatureDraft depend on the tokens before them"):
        mmspec.accelerate(model, "eagle-2", drafter=untrained_head(model), tree="parallel")
    with pytest.raises(ValueError, match="branch=0"):
        ParallelTree(branch=0)
