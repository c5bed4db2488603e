"""Tree topologies: constructors, what is derived from them, and what they refuse."""

from __future__ import annotations

import random

import pytest
import torch

from mmspec.trees import Tree

CPU = torch.device("cpu")


def any_tree(seed: int, most: int = 12) -> Tree:
    dice = random.Random(seed)
    return Tree(tuple(dice.randint(-1, node - 1) for node in range(dice.randint(0, most))))


def test_a_chain_hangs_each_node_below_the_last() -> None:
    tree = Tree.chain(4)
    assert tree.parents == (-1, 0, 1, 2)
    assert tree.is_chain
    assert tree.depth == tree.nodes == 4
    assert tree.width == 1
    assert tree.levels == ((0,), (1,), (2,), (3,))
    assert Tree.branching([1, 1, 1, 1]) == tree


def test_no_nodes_are_a_chain_too() -> None:
    tree = Tree.chain(0)
    assert tree.is_chain
    assert (tree.nodes, tree.depth, tree.width) == (0, 0, 0)
    assert tree.children_on(CPU).tolist() == [[[-1]]]
    assert tree.ancestors_on(CPU).shape == (1, 0, 0)
    assert tree == Tree(()) == Tree.branching([])


def test_branching_makes_a_complete_tree() -> None:
    tree = Tree.branching([2, 3])
    assert tree.parents == (-1, -1, 0, 0, 0, 1, 1, 1)
    assert tree.levels == ((0, 1), (2, 3, 4, 5, 6, 7))
    assert tree.children == ((0, 1), (2, 3, 4), (5, 6, 7), *((),) * 6)
    assert not tree.is_chain
    assert tree.width == 3


@pytest.mark.parametrize(
    "widths", [[10**12], [17, 17, 17], [1] * 4097], ids=["wide", "bushy", "long"]
)
def test_a_tree_of_too_many_nodes_is_not_built(widths: list[int]) -> None:
    with pytest.raises(ValueError, match="has more than 4096 nodes; give fewer"):
        Tree.branching(widths)


def test_rank_paths_as_papers_write_them() -> None:
    tree = Tree.from_ranks([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    assert tree.parents == (-1, -1, 0, 0, 1, 2)
    assert Tree.from_ranks([[1, 0], [0, 0, 0], [0], [0, 1], [1], [0, 0]]) == tree  # in any order
    assert Tree.from_ranks([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0]]) == tree  # once each


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([[0], [1, 0]], r"path \[1, 0\] has no parent \[1\]; list every prefix"),
        ([[0], [2]], r"path \[2\] skips a sibling; ranks start at 0 without gaps"),
        ([[1]], r"path \[1\] skips a sibling"),
    ],
)
def test_incomplete_rank_paths_are_refused(paths: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tree.from_ranks(paths)


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-1, 2, 0), (-2,)])
def test_a_parent_comes_before_its_child(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a parent comes before its child .* level by level"):
        Tree(parents)


@pytest.mark.parametrize("seed", range(20))
def test_everything_derived_agrees_with_the_parents(seed: int) -> None:
    tree = any_tree(seed)
    paths = []
    for node in range(tree.nodes):
        path = [node]
        while tree.parents[path[-1]] >= 0:
            path.append(tree.parents[path[-1]])
        paths.append(path)
    assert tree.depths == tuple(len(path) - 1 for path in paths)
    assert tree.depth == max(map(len, paths), default=0)
    assert tree.depths_on(CPU).tolist() == [list(tree.depths)]
    assert tree.parents_on(CPU).tolist() == [list(tree.parents)]
    table = tree.ancestors_on(CPU)[0]
    assert [set(row.nonzero()[:, 0].tolist()) for row in table] == [set(path) for path in paths]
    children = tree.children_on(CPU)[0].tolist()
    assert len(children) == tree.nodes + 1
    for parent, row in enumerate(children):
        own = [node for node in range(tree.nodes) if tree.parents[node] == parent - 1]
        assert row == own + [-1] * (max(tree.width, 1) - len(own))
    assert sorted(node for level in tree.levels for node in level) == list(range(tree.nodes))


def test_equal_trees_share_their_tables() -> None:
    """Tables are made once per topology and device, not once per round."""
    left, right = Tree.branching([2, 2]), Tree.branching([2, 2])
    assert left is not right
    assert left.ancestors_on(CPU) is right.ancestors_on(CPU)
    assert hash(left) == hash(right)
