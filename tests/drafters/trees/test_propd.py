"""ProPD: the size of the tree follows from measured times and acceptance."""

from __future__ import annotations

import pytest
import torch

from mmspec.draft import Kind
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.drafters.trees.propd import ProPD, choose_size, rank_nodes
from tests.drafters.driving import context, drive, greedy, inputs, tiny
from tests.drafters.trees.test_dyspec import Bigram
from tests.toys.readers import backbone


def test_the_size_has_the_most_tokens_per_second() -> None:
    """1 + .5 + .3 + .1 tokens in 1 + n s seconds: 1.8 / 1.2 is most at 0.1 a node."""
    rates = [0.5, 0.3, 0.1]
    for per_node, wanted in ((0.0, 3), (0.1, 2), (0.4, 1), (5.0, 1)):
        assert choose_size(rates, 0.5, (0.5, per_node)) == wanted
    assert choose_size(rates, 0.5, (0.5, 5.0), least=2) == 2


def test_nodes_are_ordered_by_the_probability_of_their_paths() -> None:
    """.6 .3 | .36 .18 (below 0) and .18 .09 (below 1)."""
    now = context([0], vocabulary=3)
    grown = DynamicTree(2, 2, 6).grow(Bigram(), now, None, None, Kind.DET)
    order = rank_nodes(grown)
    assert order is not None
    tokens = grown.draft.tokens[0].tolist()
    assert tokens[:3] == [0, 1, 0]
    assert order[0].tolist()[:3] == [0, 2, 1]
    assert sorted(order[0].tolist()) == [*range(6)]


@pytest.mark.exhaustive
def test_sizes_are_tried_and_then_chosen() -> None:
    """Rows of a batch, one padded; acceptance falls with the place in the order."""
    model = tiny()
    shape = ProPD(nodes=12, depth=3, beam=3, least=2)
    drafter = Autoregressive(SharedBackbone(backbone(model), depth=1), shape, Kind.RACE)
    prompt = inputs((0, 3))
    text, rounds = drive(model, drafter, prompt, 24)
    assert text == greedy(model, prompt, 24)
    sizes = [max(turn.drafted) for turn in rounds if turn.index]
    assert sizes[:3] == [12, 6, 3]
    found = shape.statistics
    assert found.observed[0] > found.observed[11] > 0
    assert found.rates()[0] > found.rates()[11]
    assert 2 <= found.nodes <= 12
    assert found.verify.largest == 12


def test_what_is_learned_persists() -> None:
    shape = ProPD(nodes=4)
    shape.begin().accepted[0] = 9.0
    assert shape.statistics.accepted[0] == 0.0
    with pytest.raises(ValueError, match="least=9"):
        ProPD(nodes=4, least=9)
    with pytest.raises(ValueError, match="nodes=0"):
        ProPD(nodes=0)


def test_places_of_equal_nodes_are_those_of_the_draft() -> None:
    draft = DynamicTree(1, 3, 3).grow(Bigram(), context([0], vocabulary=3), None, None, Kind.DET)
    order = rank_nodes(draft)
    assert order is not None
    assert torch.equal(order, torch.tensor([[0, 1, 2]]))
