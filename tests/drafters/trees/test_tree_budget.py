"""Sequoia's dynamic programme finds the best tree of every size."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mmspec.drafters.trees.tree_budget import TreeBudget
from mmspec.trees import Tree

FLAT, STEEP = (0.6, 0.2, 0.1), (0.8, 0.1, 0.05)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [(FLAT, [1, 1.6, 1.96, 2.176, 2.376]), (STEEP, [1, 1.8, 2.44, 2.952, 3.3616])],
)
def test_expected_tokens_are_those_of_the_published_programme(
    rates: tuple[float, ...], expected: list[float]
) -> None:
    assert TreeBudget(rates, 4, 4).tokens()[4].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rates", "levels", "expected"),
    [(FLAT, 7, 2.7456), (FLAT, 2, 2.56), (STEEP, 7, 4.1611392), (STEEP, 2, 2.79)],
)
def test_depth_is_a_limit(rates: tuple[float, ...], levels: int, expected: float) -> None:
    assert TreeBudget(rates, 7, levels).tokens()[levels, 7] == pytest.approx(expected)


@pytest.mark.parametrize("rates", [FLAT, STEEP, (0.3, 0.3, 0.1), (0.1, 0.4, 0.2), (0.5,)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_tree_is_better(rates: tuple[float, ...], depth: int) -> None:
    """All trees of up to five nodes; that of the programme is worth what it says."""
    budget = TreeBudget(rates, 5, depth)
    for nodes in range(1, 6):
        best = max(worth(tree, rates) for tree in trees(nodes, depth, len(rates)))
        assert budget.tokens()[depth, nodes] == pytest.approx(best)
        found = budget.tree(nodes, depth)
        assert found.nodes <= nodes
        assert found.depth <= depth
        assert worth(found, rates) == pytest.approx(best)


def test_a_sure_first_child_makes_a_chain() -> None:
    assert TreeBudget((0.9, 0.01), 6, 6).tree(6, 6).is_chain


@pytest.mark.parametrize("rates", [(), (0.9, 0.2), (-0.1, 0.5)])
def test_rates_that_are_no_chances_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="sum to at most 1"):
        TreeBudget(rates, 4, 4)


@pytest.mark.parametrize(("nodes", "depth"), [(0, 1), (1, 0)])
def test_a_tree_has_a_size(nodes: int, depth: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TreeBudget(FLAT, nodes, depth)


def trees(most: int, depth: int, width: int) -> list[Tree]:
    """Every tree with at most so many nodes, levels, and children per node."""
    found = [Tree(())]
    for nodes in range(1, most + 1):
        for parents in product(*(range(-1, node) for node in range(nodes))):
            tree = Tree(parents)
            if tree.depth <= depth and tree.width <= width:
                found.append(tree)
    return found


def worth(tree: Tree, rates: tuple[float, ...]) -> float:
    """Expected tokens: the target's own, plus the probability of every node's path."""
    chance: list[float] = []
    for node, parent in enumerate(tree.parents):
        rank = tree.children[parent + 1].index(node)
        chance.append((1.0 if parent < 0 else chance[parent]) * rates[rank])
    return 1 + sum(chance)


def test_a_rank_that_is_never_right_gets_no_children() -> None:
    budget = TreeBudget((0.5, 0.2, 0.0), 6, 4)
    assert not np.isnan(budget.tokens()).any()
    tree = budget.tree(6, 4)
    assert (tree.nodes, tree.width) == (6, 2)
