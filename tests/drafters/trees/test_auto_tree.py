"""Automatic trees: their shape follows measured ranks and costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind, Round, Scores, Verdict
from mmspec.drafters.draft_model import DraftUpdate
from mmspec.drafters.trees.auto_tree import AutoTree, LinearTimings, TreeStatistics
from mmspec.trees import Tree
from tests.drafters.trees.test_growing_trees import watched


def tree_statistics(
    rates: tuple[float, ...], level: float, node: float, fixed: float = 1.0
) -> TreeStatistics:
    """The statistics of a machine after many rounds."""
    known = TreeStatistics([1e6 * rate for rate in rates], num_observed=1e6)
    for size in (1, 3, 6, 12, 24):
        known.verify.add(size, fixed + node * size)
    for size in (1, 3, 6):
        known.draft.add(size, level * size)
    return known


def test_where_nodes_are_free_the_tree_is_wide_and_where_they_cost_it_is_a_chain() -> None:
    auto, rates = AutoTree(nodes=24, depth=6), (0.5, 0.2, 0.1, 0.05)
    assert len(auto.choose(tree_statistics(rates, level=0.1, node=0.0)).children[0]) == 4
    assert auto.choose(tree_statistics(rates, level=0.02, node=0.3)).is_chain
    assert auto.choose(tree_statistics((0.05, 0.02, 0.01, 0.0), level=0.5, node=0.5)).nodes == 1


def test_no_chain_would_be_faster() -> None:
    """By what it was told, for machines between the ends."""
    rates = (0.6, 0.15, 0.05, 0.02)
    for level in (0.01, 0.1, 0.3):
        for node in (0.0, 0.03, 0.1, 0.4):
            auto, known = AutoTree(nodes=24, depth=8), tree_statistics(rates, level, node)
            chosen = auto.choose(known)
            speed = tokens_of(chosen, known.rates()) / seconds_of(chosen, known)
            for length in range(1, 9):
                chain = Tree.chain(length)
                assert speed >= tokens_of(chain, known.rates()) / seconds_of(chain, known) - 1e-9


def tokens_of(tree: Tree, rates: tuple[float, ...]) -> float:
    chance: list[float] = []
    for node, parent in enumerate(tree.parents):
        rank = tree.children[parent + 1].index(node)
        chance.append((1.0 if parent < 0 else chance[parent]) * rates[rank])
    return 1 + sum(chance)


def seconds_of(tree: Tree, known: TreeStatistics) -> float:
    (_, level), (fixed, node) = known.draft.line(), known.verify.line()
    return level * tree.depth + fixed + node * tree.nodes


def test_ranks_are_counted_where_the_drafter_had_spoken() -> None:
    """A drafter that is the target itself is always right with its best token."""
    auto = AutoTree(nodes=6, depth=3)
    watched(auto, depth=2, room=30)
    assert auto.statistics.num_observed > 5
    assert auto.statistics.ranks[0] == pytest.approx(auto.statistics.num_observed)
    other = AutoTree(nodes=6, depth=3)
    watched(other, depth=1, room=30)
    assert 0 < other.statistics.ranks[0] < other.statistics.num_observed
    assert sum(other.statistics.ranks) <= other.statistics.num_observed + 1e-9


def test_an_answer_that_ends_early_says_what_longer_drafts_are_worth() -> None:
    """Rows of greedy chains of four: broken off, kept whole, ended on a drafted token, over."""
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]).expand(4, 1, 5)
    distributions = [Categorical(scores, hard=True)] * 4
    draft = Draft.chain(torch.zeros(4, 4, dtype=torch.int64), Kind.DET)
    emitted = ((0, 0, 2), (0, 0, 0, 0, 4), (0, 0), ())
    path = ((0, 1), (0, 1, 2, 3), (0, 1), ())
    verdict = Verdict(torch.zeros(4, 4), torch.tensor([2, 4, 2, 0]), torch.zeros(4))
    kept = Round(
        *(3, (4, 4, 4, 0), (2, 4, 2, 0), path, (True, True, False, False), emitted),
        (False, False, True, True),
        verdict,
        depth=4,
    )
    news = DraftUpdate(
        draft, Scores(distributions[0], torch.zeros(4, 1)), kept, ((),) * 4, 3, distributions
    )
    auto = AutoTree(width=3)
    known = auto.observe(auto.begin(), news)
    assert [num_observed for _, num_observed in known.levels] == pytest.approx(
        [3, 3, 3, 1], rel=0.1
    )
    assert [right for right, _ in known.levels] == pytest.approx([3, 3, 1, 1], rel=0.1)
    assert known.ranks[2] > 0.8  # the third was right where the first row broke off
    assert sum(known.ranks) < known.num_observed - 0.5  # and nothing behind the end


def test_costs_follow_what_was_timed_lately() -> None:
    """A slow beginning is forgotten, and a line leads from sizes that were timed to others."""
    times = LinearTimings()
    for size in (1, 3, 6):
        times.add(size, 10.0)
    for _ in range(200):
        times.add(8, 2.0)
        times.add(4, 1.6)
    fixed, each = times.line()
    assert [fixed, each] == pytest.approx([1.2, 0.1])
    assert times.largest == 8
    falling = LinearTimings(rounds=[(1, 2.0), (5, 1.0)])
    assert falling.line()[1] == 0.0  # no node pays for itself
    assert LinearTimings(True, [(2, 1.0), (4, 2.0), (4, 9.0)]).line() == (0.0, 0.5)


def test_what_was_learned_outlives_a_request_and_a_batch_of_another_size_is_timed_anew() -> None:
    auto = AutoTree(nodes=6, depth=3)
    watched(auto, room=20)
    rounds = auto.statistics.rounds
    watched(auto, room=20)
    assert auto.statistics.rounds > rounds
    timed = len(auto.statistics.verify)
    watched(auto, rows=3, room=3)
    assert len(auto.statistics.verify) < timed


@pytest.mark.parametrize("sizes", [{"nodes": 0}, {"depth": 0}, {"width": 0}, {"width": 9}])
def test_an_automatic_tree_has_sizes(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="within"):
        AutoTree(**sizes)
