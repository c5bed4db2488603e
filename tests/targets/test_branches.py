"""Uncommitted trees: what each node sees, what remains of one, and the scores of its paths."""

from typing import Any

import torch
from torch import Tensor

import mmspec
from mmspec.modalities.common.tiny_models import PROMPT, tiny_llama
from mmspec.targets.branches import Branches, Kept, read_branches, select_paths

CPU = torch.device("cpu")
#           0          paths: 0 1 3 4, 0 2
#         1   2
#        3
#       4
PARENTS = [-1, 0, 0, 1, 3]
TOKENS = [3, 2, 4, 1, 2]


def grow(tokens: list[list[int]], parents: list[list[int]]) -> Branches:
    """Trees with the same number of nodes per level in every row: one node at a time."""
    tree = Branches.empty(len(tokens), CPU)
    for place in range(len(tokens[0])):
        line = [torch.tensor([[row[place]] for row in rows]) for rows in (tokens, parents)]
        tree = tree.extend(*line)
    return tree


def test_nodes_see_their_path() -> None:
    tree = grow([TOKENS], [PARENTS])
    seen = [line.nonzero().flatten().tolist() for line in tree.visible[0]]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 3]]


def test_what_all_paths_share_is_committed() -> None:
    assert select_paths(PARENTS, [4, 3], 5) == ([0, 1, 3, 4], 3)  # 3 ends a path
    assert select_paths(PARENTS, [4, 2], 5) == ([0, 1, 2, 3, 4], 1)
    assert select_paths(PARENTS, [4], 2) == ([0, 1, 3, 4], 2)  # node 2 and later are not read
    assert select_paths(PARENTS, [-1, 4], 5) == ([0, 1, 3, 4], 0)


def test_pruned_trees_of_unequal_rows_are_padded() -> None:
    tree, kept = grow([TOKENS, TOKENS], [PARENTS, PARENTS]).prune([[4], [4, 2]], 5)
    assert kept == Kept([[0, 1, 3, 4], [0, 1, 2, 3, 4]], [4, 1], [[], [1, 2, 3, 4]])
    assert tree.tokens[1].tolist() == [2, 4, 1, 2]
    assert tree.parents[1].tolist() == [-1, -1, 0, 2]
    assert tree.depths[1].tolist() == [0, 0, 1, 2]
    assert not tree.visible[0].any()  # padding is seen by no node
    assert tree.visible[1, 3].tolist() == [True, False, True, True]


@torch.no_grad()
def test_branches_score_like_their_paths_before_and_after_a_prune() -> None:
    """Rows that keep different nodes, read in one forward."""
    model: Any = tiny_llama(seed=2)
    reader = mmspec.accelerate(model, "plain").session.bound.backbone
    memory, _, _ = reader.prefill({"input_ids": torch.tensor([PROMPT, PROMPT[::-1]])}, 64)
    tree = grow([TOKENS, TOKENS], [PARENTS, PARENTS])
    logits = read_branches(reader, memory, tree, 0)
    for row, prompt in enumerate((PROMPT, PROMPT[::-1])):
        for node in range(5):
            assert_scores(model, logits[row, node], prompt, path(PARENTS, node))
    tips = [[4, 3], [2, 1]]
    pruned, kept = tree.prune(tips, 5)
    kept.move(memory, 5)
    places = kept.places()
    newest = torch.tensor([[1, 3], [3, 1]])
    parents = [[places[row].get(tip, -1) for tip in tips[row]] for row in range(2)]
    grown = pruned.extend(newest, torch.tensor(parents))
    logits = read_branches(reader, memory, grown, pruned.nodes)
    for row, prompt in enumerate((PROMPT, PROMPT[::-1])):
        for place, tip in enumerate(tips[row]):
            tokens = [*path(PARENTS, tip), int(newest[row, place])]
            assert_scores(model, logits[row, place], prompt, tokens)


def path(parents: list[int], node: int) -> list[int]:
    found: list[int] = []
    while node >= 0:
        found.insert(0, TOKENS[node])
        node = parents[node]
    return found


def assert_scores(model: Any, scores: Tensor, prompt: Any, tokens: list[int]) -> None:
    alone = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=1e-4)
