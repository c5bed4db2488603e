"""Entropy trees: deep where the target is certain, wide where it is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mmspec.drafters.trees.entropy_tree import EntropyTree, build_tapered_tree
from mmspec.trees import Tree
from tests.drafters.driving import tiny
from tests.drafters.trees.test_growing_trees import watched


def test_sure_is_deep_and_unsure_is_wide() -> None:
    shape = EntropyTree(depth=(2, 6), width=(1, 5), nodes=30, sure=0.1, unsure=0.5)
    assert shape.tree(0.0) == Tree.chain(6)
    wide = shape.tree(1.0)
    assert (wide.depth, len(wide.children[0])) == (2, 5)
    depths = [shape.tree(entropy / 20).depth for entropy in range(20)]
    assert depths == sorted(depths, reverse=True)


def test_a_tree_tapers_within_its_nodes() -> None:
    assert build_tapered_tree(4, 2, 32) == Tree.from_ranks(
        [[0], [1], [0, 0], [1, 0], [0] * 3, [0] * 4]
    )
    assert build_tapered_tree(4, 8, 6).nodes <= 6
    assert build_tapered_tree(4, 1, 4) == Tree.chain(4)


def test_constant_ends_are_a_fixed_tree() -> None:
    fixed = watched(EntropyTree(depth=(3, 3), width=(2, 2), nodes=8), room=12)
    assert {draft.tree for draft, texts in fixed if len(texts[0]) < 18} == {
        build_tapered_tree(3, 2, 8)
    }


@torch.no_grad()
def test_the_tree_follows_the_last_distribution_of_the_target() -> None:
    """Whatever the drafter makes of it, and under greedy decoding, too."""
    shape, model = EntropyTree(depth=(1, 6), width=(1, 4), nodes=16, sure=0.0, unsure=1.0), tiny()
    for draft, texts in watched(shape, depth=1, room=30)[1:6]:
        distribution = model(input_ids=torch.tensor([texts[0][:-1]])).logits[0, -1].log_softmax(-1)
        entropy = float(-(distribution.exp() * distribution).sum()) / math.log(len(distribution))
        assert draft.tree == shape.tree(entropy)


@pytest.mark.parametrize(
    "ends", [{"depth": (3, 2)}, {"width": (0, 2)}, {"nodes": 3}, {"sure": 0.5, "unsure": 0.4}]
)
def test_ends_the_wrong_way_round_are_refused(ends: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give"):
        EntropyTree(**ends)
