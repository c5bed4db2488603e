"""Best-first trees: the nearest nodes of the whole tree, for every row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmspec.draft import Draft
from mmspec.drafters.trees.best_first import BestFirstTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from tests.drafters.driving import tiny
from tests.drafters.trees.test_growing_trees import paths, watched


@pytest.mark.parametrize("step", [0.0, 0.7, math.inf])
def test_the_search_finds_the_nearest_nodes_however_it_steps(step: float) -> None:
    """The seven likeliest paths of at most three tokens, each node with its four best children."""
    shape = BestFirstTree(nodes=7, depth=3, step=step, branch=4)
    for draft, texts in watched(shape, room=20)[:3]:
        if draft.nodes == 7:
            assert set(paths(draft)) == by_hand(texts[0], 7, 3, 4)


@torch.no_grad()
def by_hand(text: list[int], nodes: int, depth: int, branch: int) -> set[tuple[int, ...]]:
    model, scored, front = tiny(), dict[tuple[int, ...], float](), [((), 0.0)]
    for _ in range(depth):
        grown: list[Any] = []
        for path, score in front:
            distribution = (
                model(input_ids=torch.tensor([[*text, *path]])).logits[0, -1].log_softmax(-1)
            )
            values, tokens = (part.tolist() for part in distribution.topk(branch))
            pairs = zip(values, tokens, strict=True)
            grown += [((*path, token), score + value) for value, token in pairs]
        scored |= dict(grown)
        front = grown
    return {*sorted(scored, key=scored.__getitem__, reverse=True)[:nodes]}


def test_every_row_finds_its_own() -> None:
    """Rows of a batch draft what they draft alone."""
    shape = BestFirstTree(nodes=6, depth=3, step=0.5, branch=3)
    draft, texts = watched(shape, rows=3)[0]
    for row, text in enumerate(texts):
        assert set(paths(draft, row)) == by_hand(text, 6, 3, 3)


def test_it_keeps_as_much_as_a_beam_can() -> None:
    """Of equally many nodes: their chances sum to at least those of EAGLE-2's beam."""
    model = tiny()
    best = watched(BestFirstTree(nodes=8, depth=3, step=0.5, branch=3))[0]
    beam = watched(DynamicTree(depth=3, beam=3, nodes=8))[0]
    assert best[1] == beam[1]
    assert mass(model, best[1][0], best[0]) >= mass(model, beam[1][0], beam[0]) - 1e-6


@torch.no_grad()
def mass(model: Any, text: list[int], draft: Draft) -> float:
    total = 0.0
    for path in paths(draft):
        distribution = model(input_ids=torch.tensor([[*text, *path]])).logits[0].log_softmax(-1)
        total += math.exp(
            sum(float(distribution[len(text) - 1 + at, one]) for at, one in enumerate(path))
        )
    return total


def test_a_threshold_above_one_leaves_a_chain() -> None:
    for draft, _ in watched(BestFirstTree(nodes=9, depth=3, step=0.0, threshold=1.1)):
        assert draft.parents[0].tolist() == list(range(-1, draft.nodes - 1))


def test_unlikely_siblings_are_not_drafted() -> None:
    model = tiny()
    draft, texts = watched(BestFirstTree(nodes=40, depth=2, step=math.inf, threshold=0.5))[0]
    for path in paths(draft):
        with torch.no_grad():
            ids = torch.tensor([[*texts[0], *path[:-1]]])
            distribution = model(input_ids=ids).logits[0, -1].softmax(-1)
        assert distribution[path[-1]] >= 0.5 * distribution.max() - 1e-6


def test_far_paths_are_not_drafted() -> None:
    shape = BestFirstTree(nodes=40, depth=3, step=0.7, branch=4)
    wide = watched(shape)[0]
    near = watched(replace(shape, farthest=3.0))[0]
    assert wide[1] == near[1]
    model, text = tiny(), wide[1][0]
    limit = math.exp(-3.0)
    firsts = {path for path in paths(wide[0]) if mass_of(model, text, path) >= limit}
    assert firsts <= set(paths(near[0])) < set(paths(wide[0]))
    inner = {path[:-1] for path in paths(near[0]) if len(path) > 1}
    assert all(mass_of(model, text, path) >= limit for path in inner)


@torch.no_grad()
def mass_of(model: Any, text: list[int], path: tuple[int, ...]) -> float:
    """The probability of a path after a text."""
    logits = model(input_ids=torch.tensor([[*text, *path]])).logits[0].log_softmax(-1)
    return math.exp(sum(float(logits[len(text) - 1 + at, one]) for at, one in enumerate(path)))


@pytest.mark.parametrize(
    "sizes", [{"nodes": 0}, {"depth": 0}, {"branch": 0}, {"step": -1.0}, {"threshold": math.nan}]
)
def test_sizes_that_are_none_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|below 0"):
        BestFirstTree(**sizes)
