"""Token recycling stores the target's candidates and fills its tree with them."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch

import mmspec
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind, Round, Scores, Verdict
from mmspec.drafters.lookup.token_recycling import (
    RANKS,
    TREE,
    TokenRecycling,
    blank,
    fill,
    product_tree,
    update_table,
)
from mmspec.trees import Tree
from tests import toys
from tests.drafters.driving import CPU, context, count_accepted, drive, greedy, inputs, tiny


def test_the_default_tree_is_what_its_rule_builds() -> None:
    assert product_tree(RANKS, nodes=32, depth=6) == TREE


@pytest.mark.parametrize("ranks", [(0.6, 0.3, 0.1), (0.4, 0.3, 0.2, 0.05)])
def test_the_tree_has_the_likeliest_nodes(ranks: tuple[float, ...]) -> None:
    def weight(path: tuple[int, ...]) -> float:
        return prod(ranks[rank] for rank in path)

    everything = [path for size in (1, 2, 3) for path in product(range(len(ranks)), repeat=size)]
    for nodes in (1, 4, 6, 9):
        tree = product_tree(ranks, nodes, depth=3)
        best = sorted(map(weight, everything), reverse=True)[:nodes]
        rank = {node: rank for kids in tree.children for rank, node in enumerate(kids)}
        found: list[float] = []
        for node, parent in enumerate(tree.parents):
            found.append(ranks[rank[node]] * (found[parent] if parent >= 0 else 1.0))
        assert sorted(found, reverse=True) == pytest.approx(best)
    with pytest.raises(ValueError, match="must fall"):
        product_tree((0.1, 0.5), 4, 2)


def test_the_best_candidates_are_remembered_and_the_last_equal_token_counts() -> None:
    table = blank(12, CPU)
    scores = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(0))
    read = torch.tensor([[3, 5, 3, 7], [5, 3, 9, 3]])
    known = torch.tensor([[True, True, True, True], [True, True, True, False]])
    update_table(table, read, known, scores)
    want = {3: scores[1, 1], 5: scores[1, 0], 7: scores[0, 3], 9: scores[1, 2]}
    for token in range(12):
        row = want[token].topk(8).indices.tolist() if token in want else [-1] * 8
        assert table[token].tolist() == row


def test_impossible_tokens_are_not_remembered() -> None:
    table = blank(10, CPU)
    scores = torch.full((1, 1, 10), -torch.inf)
    scores[0, 0, [4, 2]] = torch.tensor([1.0, 2.0])
    update_table(table, torch.tensor([[1]]), torch.tensor([[True]]), scores)
    assert table[1].tolist() == [2, 4, -1, -1, -1, -1, -1, -1]


def test_a_vocabulary_smaller_than_the_table_is_wide() -> None:
    table = blank(3, CPU)
    scores = torch.tensor([[[0.1, 0.3, 0.2]]])
    update_table(table, torch.tensor([[1]]), torch.tensor([[True]]), scores)
    assert table[1].tolist() == [1, 2, 0, -1, -1, -1, -1, -1]


@pytest.mark.parametrize(
    "tree", [Tree.branching([2, 2]), Tree((-1, 0, -1, 0, 2)), Tree.chain(3)], ids=repr
)
def test_the_tree_follows_the_table(tree: Tree) -> None:
    table = blank(5, CPU)
    for token, candidates in {0: [1, 2], 1: [3, 0], 3: [1]}.items():
        table[token, : len(candidates)] = torch.tensor(candidates)
    tokens, mask = fill(tree, table, torch.tensor([[0]]))
    rank = {node: rank for kids in tree.children for rank, node in enumerate(kids)}
    seen: dict[int, int | None] = {-1: 0}
    for node, parent in enumerate(tree.parents):
        above = seen[parent]
        candidate = -1 if above is None else int(table[above, rank[node]])
        seen[node] = candidate if candidate >= 0 else None
        assert bool(mask[0, node]) == (candidate >= 0)
        if candidate >= 0:
            assert int(tokens[0, node]) == candidate


def test_it_starts_cold_and_learns_from_rejected_nodes() -> None:
    drafter, now = TokenRecycling(Tree.branching([2, 1])), context([6, 1], vocabulary=10)
    state = drafter.begin(now)
    empty = drafter.propose(now, state)
    assert empty.nodes == 0
    # a draft from elsewhere: 1 -> (4, 5), both rejected; the target says 5 behind 4, and 4 behind 1
    draft = Draft.from_tree(Tree((-1, -1)), torch.tensor([[5, 4]]), Kind.DET)
    scores = torch.zeros(1, 3, 10)
    scores[0, 0, [4, 5]] = torch.tensor([2.0, 1.0])
    scores[0, 1, 8] = scores[0, 2, 9] = 1.0
    now.history[0].append(4)
    state = drafter.observe(now, state, draft, _scores(scores), _round(((4,),), nodes=2))
    again = drafter.propose(now, state)  # 4 was a rejected node: its row is known
    assert again.kind is Kind.DET
    assert again.tokens[0, 0] == 9
    now.history[0].append(1)
    again = drafter.propose(now, state)
    assert again.tokens[0, :2].tolist() == [4, 5]  # behind 1
    assert again.tokens[0, 2:].tolist() == [9, 8]  # behind 4 and behind 5
    assert again.mask.all()
    now.history[0].append(2)
    assert drafter.propose(now, state).nodes == 0  # 2 was never scored


def test_masked_nodes_teach_nothing() -> None:
    """They hold the last token, so their scores would be stored for that token."""
    drafter, now = TokenRecycling(Tree.branching([2])), context([6, 1], vocabulary=10)
    state = drafter.begin(now)
    drafter.propose(now, state)
    mask = torch.tensor([[True, False]])
    draft = Draft.from_tree(Tree((-1, 0)), torch.tensor([[5, 1]]), Kind.DET, mask=mask)
    scores = torch.zeros(1, 3, 10)
    scores[0, 0, 4] = scores[0, 1, 8] = scores[0, 2, 9] = 1.0
    now.history[0].append(4)
    state = drafter.observe(now, state, draft, _scores(scores), _round(((4,),), nodes=1))
    assert state.table[[1, 5], 0].tolist() == [4, 8]


def test_finished_rows_teach_nothing() -> None:
    drafter, now = TokenRecycling(Tree.chain(2)), context([6, 1], [3, 2], vocabulary=10)
    state = drafter.begin(now)
    draft = drafter.propose(now, state)
    now.history[0].append(4)
    turn = _round(((4,), ()), nodes=0)
    state = drafter.observe(now, state, draft, _scores(torch.rand(2, 1, 10)), turn)
    assert (state.table[1] >= 0).all()
    assert (state.table[2] < 0).all()


@pytest.mark.parametrize("padding", [(0,), (0, 3, 5)])
def test_greedy_decoding_is_unchanged_and_shorter(padding: tuple[int, ...]) -> None:
    model, prompt = tiny(), inputs(padding)
    text, rounds = drive(model, TokenRecycling(), prompt, room=40)
    assert text == greedy(model, prompt, 40)
    assert count_accepted(rounds) > 0
    assert any(path and path != tuple(range(len(path))) for turn in rounds for path in turn.path)


@pytest.mark.parametrize("seed", [None, 3])
def test_later_requests_find_what_was_remembered(seed: int | None) -> None:
    """The same request again needs fewer calls and has the same output: greedy or coupled."""
    model, request = toys.model("llama"), toys.inputs("llama")
    how: dict[str, Any] = {"max_new_tokens": 24}
    how |= {} if seed is None else {"seed": seed, "temperature": 0.5}
    plain = mmspec.decode_plain(model, **request, **how)
    warm = mmspec.accelerate(model, "token-recycling", fresh=False)
    fresh = mmspec.accelerate(model, "token-recycling")
    first, again = (warm.generate(**request, **how) for _ in range(2))
    for out in (first, again, fresh.generate(**request, **how), fresh.generate(**request, **how)):
        assert torch.equal(out.sequences, plain.sequences)
    assert fresh.last_stats is not None
    assert fresh.last_stats.target_calls == first.stats.target_calls
    assert again.stats.target_calls < first.stats.target_calls


def test_a_tree_that_is_too_wide_is_refused() -> None:
    with pytest.raises(ValueError, match="9 children"):
        TokenRecycling(Tree.branching([9]))


def _scores(scores: torch.Tensor) -> Scores:
    return Scores(Categorical(scores, hard=True), torch.zeros(scores.shape[:2]))


def _round(tokens: tuple[tuple[int, ...], ...], nodes: int) -> Round:
    rows = len(tokens)
    zeros = torch.zeros(rows, dtype=torch.int64)
    return Round(
        index=1,
        drafted=(nodes,) * rows,
        accepted=(0,) * rows,
        path=((),) * rows,
        takes_next=(True,) * rows,
        tokens=tokens,
        finished=(False,) * rows,
        verdict=Verdict(zeros[:, None], zeros, zeros),
        depth=min(nodes, 1),
    )
