"""Drafts: a topology shared by all rows says the same as one of its own per row."""

from __future__ import annotations

import random

import pytest
import torch

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.trees import Tree

CPU = torch.device("cpu")
TREES = [
    Tree.chain(1),
    Tree.chain(5),
    Tree.branching([3]),
    Tree.branching([2, 2, 1]),
    Tree((-1, 0, -1, 2, 2, 4, 0)),
]


def own(draft: Draft) -> Draft:
    """The same draft without the knowledge that rows share their topology."""
    return Draft(
        draft.tokens, draft.parents, draft.mask, draft.kind, draft.distribution, None, draft.padded
    )


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.parents))
def test_static_and_dynamic_topologies_agree(tree: Tree) -> None:
    draft = Draft.from_tree(tree, torch.randint(9, (3, tree.nodes)), Kind.DET)
    dynamic = own(draft)
    assert dynamic.tree is None
    assert torch.equal(draft.depths(), dynamic.depths())
    assert torch.equal(draft.ancestors(), dynamic.ancestors())
    assert torch.equal(draft.children(), dynamic.children())


def test_rows_of_a_dynamic_draft_have_their_own_topology() -> None:
    dice = random.Random(0)
    trees = [Tree(tuple(dice.randint(-1, node - 1) for node in range(11))) for _ in range(6)]
    parents = torch.tensor([tree.parents for tree in trees])
    draft = Draft(torch.zeros(6, 11).long(), parents, torch.ones(6, 11).bool(), Kind.DET)
    width = max(tree.width for tree in trees)
    for row, tree in enumerate(trees):
        assert torch.equal(draft.depths()[row], tree.depths_on(CPU)[0])
        assert torch.equal(draft.ancestors()[row], tree.ancestors_on(CPU)[0])
        children = draft.children()[row]
        assert children.shape == (12, width)
        assert torch.equal(children[:, : tree.width], tree.children_on(CPU)[0])
        assert bool((children[:, tree.width :] == -1).all())


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 33])
def test_long_paths_are_followed_to_the_root(length: int) -> None:
    draft = own(Draft.chain(torch.zeros(2, length).long(), Kind.DET))
    assert torch.equal(draft.depths(), torch.arange(length).expand(2, -1))
    assert torch.equal(draft.ancestors()[0], torch.ones(length, length).tril().bool())


def test_a_chain_is_a_chain() -> None:
    distribution = Categorical(torch.randn(2, 3, 5))
    draft = Draft.chain(torch.zeros(2, 3).long(), Kind.IID, distribution)
    assert draft.is_chain
    assert (draft.batch, draft.nodes) == (2, 3)
    assert not draft.padded
    assert bool(draft.mask.all())
    assert draft.distribution is distribution
    assert draft.parents.tolist() == [[-1, 0, 1]] * 2
    assert not own(draft).is_chain  # nobody knows without looking at the parents
    assert not Draft.from_tree(Tree.branching([2]), torch.zeros(1, 2).long(), Kind.WOR).is_chain


def test_a_mask_makes_a_draft_padded() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    draft = Draft.chain(torch.zeros(2, 2).long(), Kind.DET, mask=mask)
    assert draft.padded
    assert draft.mask is mask


def test_nothing_is_a_draft_too() -> None:
    draft = Draft.empty(3, CPU)
    assert (draft.batch, draft.nodes) == (3, 0)
    assert draft.is_chain
    assert draft.tokens.dtype == torch.int64
    assert draft.depths().shape == (3, 0)
    assert draft.ancestors().shape == (3, 0, 0)
    assert draft.children().tolist() == [[[-1]]] * 3
    assert Draft.empty(1, CPU, torch.float32).tokens.dtype == torch.float32


def test_continuous_tokens_keep_their_shape() -> None:
    draft = Draft.chain(torch.randn(2, 4, 3, 3), Kind.RACE)
    assert (draft.batch, draft.nodes) == (2, 4)
    assert draft.depths().shape == (2, 4)
    assert draft.mask.shape == (2, 4)
