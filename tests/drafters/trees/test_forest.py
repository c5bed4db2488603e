"""Forests: nodes read in any blocks see their ancestors alone, and drafts keep their topology."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.drafters.draft_model import DraftModel, DraftNodes
from mmspec.drafters.trees.forest import Forest
from mmspec.targets.tokens.context import Context
from tests.drafters.driving import context

SIZE = 11


def scores_after(text: list[int]) -> Tensor:  # (V,)
    """Scores that depend on every token of a text and on their order."""
    seed = sum((at + 1) * 31**at * (token + 1) for at, token in enumerate(text)) % 2**31
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class WholeText(DraftModel):
    """Predicts from the text that is visible to each node, in the order of reading."""

    sees = "the text"

    def predict_first(self, context: Context, state: Any) -> Categorical:
        return Categorical(torch.stack([scores_after(row)[None] for row in context.history]))

    def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical:
        tokens = torch.cat((*nodes.earlier, nodes.tokens), 1)
        rows = []
        for row, history in enumerate(context.history):
            texts = [history + tokens[row, seen].tolist() for seen in nodes.layout.visible[row]]
            rows.append(torch.stack([scores_after(text) for text in texts]))
        return Categorical(torch.stack(rows))


def forest(rows: int = 1, count: int = 2) -> Forest:
    texts = [[1, 2, 3], [4, 5]][:rows]
    return Forest(WholeText(), context(*texts, vocabulary=SIZE), None, Kind.DET, count)


def best(text: list[int], count: int = 2) -> tuple[int, ...]:
    return tuple(scores_after(text).topk(count).indices.tolist())


def test_candidates_are_those_of_the_text_before_each_node() -> None:
    """a - c        read: (a, b), then (c, d)
    b - d
    """
    grown = forest()
    (root,) = grown.root()
    assert root.tokens == best([1, 2, 3])
    a, b = (grown.add(0, token, -1) for token in root.tokens)
    after = grown.read([[a, b]])[0]
    for node, found in zip(root.tokens, after, strict=True):
        assert found.tokens == best([1, 2, 3, node])
    c, d = (grown.add(0, next_.tokens[0], node) for node, next_ in zip((a, b), after, strict=True))
    deeper = grown.read([[c, d]])[0]
    for first, second, found in zip(root.tokens, after, deeper, strict=True):
        assert found.tokens == best([1, 2, 3, first, second.tokens[0]])


def test_blocks_of_reading_do_not_change_candidates() -> None:
    together, apart = forest(), forest()
    nodes = []
    for grown in (together, apart):
        nodes = [grown.add(0, token, -1) for token in grown.root()[0].tokens]
    both = together.read([nodes])[0]
    assert both == [apart.read([[node]])[0][0] for node in nodes]


def test_rows_do_not_depend_on_each_other() -> None:
    pair = forest(rows=2)
    roots = pair.root()
    first = [pair.add(0, token, -1) for token in roots[0].tokens]
    alone = pair.add(1, roots[1].tokens[0], -1)
    found = pair.read([first, [alone]])
    assert found[0][0].tokens == best([1, 2, 3, roots[0].tokens[0]])
    assert found[1][0].tokens == best([4, 5, roots[1].tokens[0]])


def test_a_draft_has_the_nodes_that_were_kept() -> None:
    grown = forest(rows=2)
    for row, parents in enumerate(([-1, -1, 0, 1, 3], [-1])):
        for token, parent in enumerate(parents):
            grown.add(row, token + 5 * row, parent)
    grown.keep([[1, 3, 4], [0]])
    draft = grown.trees().draft
    assert draft.tokens[0].tolist() == [1, 3, 4]
    assert draft.parents.tolist() == [[-1, 0, 1], [-1, -1, -1]]
    assert draft.mask.tolist() == [[True] * 3, [True, False, False]]
    assert draft.tokens[1].tolist() == [5, 5, 5]  # padded with the last token of the text


def test_cut_removes_the_last_nodes() -> None:
    grown = forest()
    nodes = [grown.add(0, token, token - 1) for token in range(4)]
    grown.cut(0, 3)
    grown.read([[nodes[0]]])
    drafted = grown.chains()
    assert drafted.draft.tokens.tolist() == [[0]]
    assert drafted.draft.is_chain
    assert drafted.places == [[0]]
