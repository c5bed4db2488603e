"""Predicted tokens of trees, acceptance by rank from rounds, and the report of all shapes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmspec
from mmspec import zoo
from mmspec.bench.studies.trees import (
    compare_trees,
    expected_tokens,
    make_shapes,
    observed_rates,
)
from mmspec.drafters.trees.c2t import TreeHead
from mmspec.drafters.trees.tree_budget import TreeBudget
from mmspec.modality import Workload
from mmspec.trees import Tree
from mmspec.zoo import language

RATES = (0.6, 0.2, 0.1)
TREE = Tree((-1, -1, -1, 0, 0, 1, 3, 3))


@pytest.mark.parametrize(("nodes", "depth"), [(1, 8), (2, 8), (3, 8), (4, 8), (7, 8), (7, 2)])
def test_the_predicted_tokens_are_those_of_the_programme(nodes: int, depth: int) -> None:
    """Oracles of Chen et al. 2024: 1.6, 1.96, 2.176, 2.376, 2.7456, and 2.56 in three levels."""
    levels = min(depth, nodes)
    budget = TreeBudget(RATES, nodes, levels)
    expected = {1: 1.6, 2: 1.96, 3: 2.176, 4: 2.376, 7: 2.7456 if depth > 2 else 2.56}[nodes]
    assert expected_tokens(budget.tree(nodes, levels), RATES) == pytest.approx(expected)
    assert budget.tokens()[levels, nodes] == pytest.approx(expected)


def simulate(rates: Sequence[float], rounds: int, seed: int) -> list[Any]:
    """Rounds whose child j of a node is accepted with `rates[j]`, while the others are not."""
    draw, found = random.Random(seed), []
    for _ in range(rounds):
        path: list[int] = []
        while children := TREE.children[path[-1] + 1 if path else 0]:
            (rank,) = draw.choices(range(len(rates) + 1), (*rates, 1 - sum(rates)))
            if rank >= len(children):
                break
            path.append(children[rank])
        found.append(SimpleNamespace(drafted=(TREE.nodes,), path=(tuple(path),)))
    return found


def test_rates_and_tokens_are_those_of_simulated_rounds() -> None:
    rounds = simulate(RATES, 4_000, 0)
    found = observed_rates(rounds, TREE, 3)
    assert found == pytest.approx(RATES, abs=0.03)
    measured = sum(len(one.path[0]) + 1 for one in rounds) / len(rounds)
    assert expected_tokens(TREE, RATES) == pytest.approx(measured, abs=0.06)
    conditional = [0.6, 0.2 / 0.4, 0.1 / 0.2]  # wrong: of those after the first ones failed
    assert abs(expected_tokens(TREE, conditional) - measured) > 0.3


def test_a_tree_cut_at_the_end_of_the_output_is_left_out() -> None:
    rounds = simulate(RATES, 20, 1)
    cut: list[Any] = [SimpleNamespace(drafted=(2,), path=((0,),))] * 50
    assert observed_rates([*rounds, *cut], TREE, 3) == observed_rates(rounds, TREE, 3)
    with pytest.raises(ValueError, match="no round drafted a whole tree"):
        observed_rates(cut, TREE, 3)


@pytest.mark.parametrize("nodes", [1, 2, 5, 16])
def test_no_fixed_shape_exceeds_its_nodes_or_is_predicted_above_the_programme(nodes: int) -> None:
    shapes = make_shapes(RATES, nodes, nodes, TreeHead())
    fixed = {name: one for name, one in shapes if isinstance(one, Tree)}
    assert len(shapes) == len(fixed) + 7
    assert {one.nodes for one in fixed.values()} == {nodes}
    tokens = {name: expected_tokens(one, RATES) for name, one in fixed.items()}
    assert max(tokens.values()) == pytest.approx(tokens["Sequoia"])


@pytest.mark.exhaustive
def test_all_shapes_of_one_pair() -> None:
    model, small, processor = zoo.load("llava"), zoo.load("llava-drafter"), zoo.processor("llava")
    requests = []
    for example in language.examples(2, "held-out", 0, kind="caption"):
        text = language.format_prompt(processor, example.prompt)
        inputs = processor(text=[text], images=[example.image], return_tensors="pt")
        requests.append({**inputs, "max_new_tokens": 14})

    def bind(recipe: str, **parts: Any) -> Any:
        return mmspec.accelerate(model, recipe, drafter=small, **parts)

    unused: Any = None  # nothing is timed
    work = Workload(timed=requests, plain=unused, fast=unused, device=torch.device("cpu"))
    found = compare_trees(bind, work, nodes=[6], depth=4)
    assert len(found.points) == 10
    fixed = ("chain", "two children each", "Sequoia")
    for point in found.points:
        assert 1 <= point.measured <= 7
        assert point.drafted <= 6
        assert (point.predicted is None) == (point.shape not in fixed)
    assert sum(found.rates) <= 1
    with pytest.raises(ValueError, match="1 request is too few"):
        compare_trees(bind, Workload(timed=requests[:1], plain=unused, fast=unused), nodes=[6])
