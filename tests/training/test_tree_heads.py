"""Tree heads are trained on which nodes of dynamic trees are accepted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mmspec
from mmspec.draft import Kind
from mmspec.drafters.trees.c2t import C2T
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.training.tree_heads import RecordedTree, fit_tree, node_features, train_tree
from tests import toys
from tests.drafters.driving import context
from tests.drafters.trees.test_dyspec import Bigram, Q
from tests.partners import noisy


def test_features_of_the_nodes_of_a_draft() -> None:
    """By hand: q = .6 and .3 after token 0, of which each has two children."""
    now = context([0], [0], vocabulary=3)
    grown = DynamicTree(2, 2, 6).grow(Bigram(), now, None, None, Kind.DET)
    found = node_features(grown)[1]
    q = Q.float()
    paths: list[tuple[int, ...]] = []
    pairs = zip(grown.draft.tokens[1].tolist(), grown.draft.parents[1].tolist(), strict=True)
    for node, (token, parent) in enumerate(pairs):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        before = (0, *paths[node][:-1])
        chance = math.prod(float(q[a, b]) for a, b in zip(before, paths[node], strict=True))
        row = q[before[-1]]
        entropy = float(-(row * row.log()).sum())
        wanted = torch.tensor([math.log(chance), entropy, math.log(len(paths[node]))])
        torch.testing.assert_close(found[node], wanted)


def test_a_head_predicts_the_chance_of_acceptance() -> None:
    """Accepted as often as the probability of the path says; a constant is worse."""
    noise = torch.Generator().manual_seed(0)
    features = torch.rand(800, 3, generator=noise) * torch.tensor([-4.0, 1.0, 1.0])
    labels = torch.bernoulli(features[:, 0].exp(), generator=noise)
    found = fit_tree(features, labels, steps=150, rate=0.05)
    chances = found.head(features).sigmoid()
    assert (chances - features[:, 0].exp()).abs().mean() < 0.06
    assert (labels.mean() - features[:, 0].exp()).abs().mean() > 0.15
    assert found.accepted == float(labels.mean())


@pytest.mark.exhaustive
def test_trained_on_a_run_it_drafts_less_for_as_much() -> None:
    """Against the dynamic tree that it was trained on, on the same requests."""
    model, drafter = toys.model("llama"), noisy("llama", scale=0.05)
    request = toys.inputs("llama", batch=2)
    given = {**request, "max_new_tokens": 24, "do_sample": False}

    def bind(shape: Any) -> mmspec.Accelerated:
        return mmspec.accelerate(model, "coupled", drafter=drafter, tree=shape)

    found = train_tree(bind, [given], depth=3, nodes=24, steps=300)
    assert found.num_nodes > 100
    assert 0 < found.accepted < 0.5
    share = found.accepted
    assert found.loss < -share * math.log(share) - (1 - share) * math.log(1 - share)
    whole = bind(RecordedTree(DynamicTree(3, 8, 24))).generate(**given)
    fewer = bind(C2T(found.head, 0.05, depth=3)).generate(**given)
    assert torch.equal(whole.sequences, fewer.sequences)
    assert fewer.stats.num_draft_tokens < 0.7 * whole.stats.num_draft_tokens
    shares = [
        one.stats.num_accepted_draft_tokens / one.stats.num_draft_tokens for one in (whole, fewer)
    ]
    assert shares[1] > 1.3 * shares[0]
    assert fewer.stats.mean_acceptance_length > 0.75 * whole.stats.mean_acceptance_length
    with pytest.raises(ValueError, match="no token was drafted"):
        train_tree(bind, [{**given, "max_new_tokens": 1}], steps=20)
