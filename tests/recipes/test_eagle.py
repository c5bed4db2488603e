"""EAGLE and EAGLE-2 sample the target's distribution, on the published trees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec import recipes
from mmspec.bench.enumeration import TOLERANCE, enumerate_verifier
from mmspec.bench.frequency import chi_square
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.modalities.common.tiny_models import (
    joint_distribution,
    random_drafter,
    request,
    tiny_llama,
)
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.recursive import Recursive
from tests.covering import exhaustive


class FromTarget(Exact):
    """Wrong: it corrects from the target's distribution where the residual belongs."""

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


def test_the_trees_are_the_published_ones() -> None:
    static, dynamic = recipes.get("eagle").execution, recipes.get("eagle-2").execution
    assert [len(level) for level in static.tree.levels] == [4, 8, 8, 3, 2]
    assert (dynamic.depth, dynamic.beam, dynamic.nodes) == (6, 10, 59)


def test_the_rejection_of_eagle_is_exact_by_enumeration() -> None:
    verifier = recipes.get("eagle").verifier
    assert isinstance(verifier, Recursive)
    assert enumerate_verifier(verifier, (Kind.WOR,)).error <= TOLERANCE


@pytest.mark.parametrize("recipe", exhaustive(["eagle", "eagle-2"], {"eagle-2"}))
def test_the_joint_distribution_of_four_tokens_is_the_targets(recipe: str) -> None:
    """Chi-square over all sequences of a tiny model; z > 3 has a chance of about 0.4 % a case."""
    assert abs(z_score(recipe, 3_000)) < 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["eagle", "eagle-2"])
def test_the_joint_distribution_on_many_sequences(recipe: str) -> None:
    """z grows with the rows: a mistake of a tenth of the control's is still seen."""
    assert abs(z_score(recipe, 30_000, first=10_000_000)) < 3


def test_a_correction_from_the_target_distribution_is_seen() -> None:
    """Negative control: the same drafts, with a rule that corrects from p, are far off."""
    assert z_score("eagle", 3_000, wrong=True) > 6


def z_score(recipe: str, rows: int, first: int = 0, wrong: bool = False) -> float:
    target, room, size = tiny_llama(4, seed=3), 4, 4
    verifier = Recursive(FromTarget()) if wrong else None
    tree = [2, 2, 1] if recipe == "eagle" else DynamicTree(3, 2, 5, (Kind.DET,))
    fast = mmspec.accelerate(
        target,
        recipe,
        drafter=random_drafter(recipes.get(recipe), target, 4),
        tree=tree,
        verifier=verifier,
    )
    distribution, batch = joint_distribution(target, room).flatten(), 3000
    counts = torch.zeros_like(distribution)
    powers = size ** torch.arange(room - 1, -1, -1)
    for start in range(first, first + rows, batch):
        ids = list(range(start, start + batch))
        out = fast.generate(
            **request(batch), temperature=1.0, top_k=0, max_new_tokens=room, seed=7, row_ids=ids
        )
        assert out.stats.fallback is None
        codes = (out.sequences[:, -room:] * powers).sum(-1)
        counts += torch.bincount(codes, minlength=len(distribution)).double()
    statistic, cells = chi_square(counts, distribution * rows)
    return float((statistic - (cells - 1)) / (2 * (cells - 1)) ** 0.5)
