"""Shapes of draft trees at equal numbers of nodes: tokens per call, predicted and measured.

Half of the requests measure how often the drafter's best, second, ... token is the target's. These
rates are what Sequoia's dynamic programme (`TreeBudget`) builds its tree from, and with them the
tokens per call of every fixed tree are predicted, and the classifier of C2T is trained on it. The
other half of the requests is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from mmspec.accelerated import Accelerated
from mmspec.bench.reporting import PointTable, Progress, describe_environment, silent
from mmspec.draft import Kind, Round
from mmspec.drafters.shapes import Shape
from mmspec.drafters.trees.best_first import BestFirstTree
from mmspec.drafters.trees.c2t import C2T, TreeHead
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.drafters.trees.dyspec import DySpec
from mmspec.drafters.trees.entropy_tree import EntropyTree
from mmspec.drafters.trees.propd import ProPD
from mmspec.drafters.trees.stochastic_beam import StochasticBeam
from mmspec.drafters.trees.tree_budget import TreeBudget
from mmspec.modality import Workload
from mmspec.training.tree_heads import train_tree
from mmspec.trees import Tree

RECIPE = "coupled"  # exact for every shape, so that all shapes have the same output
DRAWS = "rejection"  # the verifier of shapes that are drawn from q; greedily the same output
RANKS = 6  # children per node of the tree that measures the rates


@dataclass(frozen=True)
class TreePoint:
    """One shape at one number of nodes."""

    shape: str
    nodes: int  # at most
    drafted: float  # nodes per round
    depth: float  # levels per round
    predicted: float | None  # tokens per call; None = the tree depends on the round
    measured: float  # tokens per call of rounds that no stop condition cut
    rounds: int

    def flat(self) -> dict[str, object]:
        return vars(self)


@dataclass(frozen=True)
class TreeTable(PointTable):
    """The report of `mmspec bench trees`."""

    model: str
    rates: list[float]  # that child j of a node is accepted; those before it then are not
    points: list[TreePoint]
    environment: dict[str, Any] = field(default_factory=dict)


def compare_trees(
    accelerated: Callable[..., Accelerated],
    workload: Workload,
    *,
    model: str = "model",
    nodes: Sequence[int] = (8, 16, 32),
    depth: int = 8,
    seed: int = 0,
    progress: Progress = silent,
) -> TreeTable:
    """Measure all shapes; `accelerated(recipe, **parts)` binds recipes to one pair.

    Raises ValueError for fewer than two requests, as half of them measure the rates.
    """
    requests = list(workload.timed)
    if len(requests) < 2:
        raise ValueError(
            f"{len(requests)} request is too few: half of them measure the acceptance by rank; "
            "give two or more"
        )
    wide = Tree.branching([RANKS, RANKS])
    rates = observed_rates(run_rounds(accelerated, wide, requests[::2], seed), wide, RANKS)
    head = train_tree(
        lambda shape: accelerated(RECIPE, tree=shape), requests[::2], depth, max(nodes), seed=seed
    ).head
    cases = [(count, *one) for count in nodes for one in make_shapes(rates, count, depth, head)]
    points = []
    for done, (count, name, tree) in enumerate(cases):
        progress("trees", done, len(cases))
        rounds = run_rounds(accelerated, tree, requests[1::2], seed)
        points.append(_point(name, count, tree, rates, rounds))
    return TreeTable(model, rates, points, describe_environment(workload.device))


def make_shapes(
    rates: Sequence[float], nodes: int, depth: int, head: TreeHead
) -> list[tuple[str, Any]]:
    """Names and shapes of at most so many nodes and levels; the chain is as long as the budget."""
    levels, beam = min(depth, nodes), min(8, nodes)
    binary = Tree.branching([2] * nodes.bit_length()).parents[:nodes]
    return [
        ("chain", Tree.chain(nodes)),
        ("two children each", Tree(binary)),
        ("Sequoia", TreeBudget(rates, nodes, levels).tree(nodes, levels)),
        ("dynamic (EAGLE-2)", DynamicTree(depth=levels, beam=beam, nodes=nodes)),
        ("best first (OPT-Tree)", BestFirstTree(nodes=nodes, depth=levels)),
        ("entropy (SAGE)", EntropyTree(depth=(min(2, levels), levels), nodes=nodes)),
        ("classifier (C2T)", C2T(head, 0.05, levels, beam, nodes)),
        ("timed size (ProPD)", ProPD(nodes, levels, beam, min(4, nodes))),
        ("drawn (DySpec)", DySpec(levels, beam, nodes)),
        ("drawn beam (RSD-S)", StochasticBeam(levels, max(1, nodes // levels))),
    ]


def run_rounds(
    accelerated: Callable[..., Accelerated], tree: Any, requests: Iterable[Any], seed: int
) -> list[Round]:
    """All rounds of the requests, one after the other, that drafted and were not cut by a stop."""
    is_drawn = isinstance(tree, Shape) and tree.kinds == (Kind.WOR,)
    verifier = {"verifier": DRAWS} if is_drawn else {}
    fast, rounds = accelerated(RECIPE, tree=tree, **verifier), list[Round]()
    for request in requests:
        fast.generate(**request, seed=seed, on_round=rounds.append)
    return [one for one in rounds if one.calls and one.drafted[0] and not one.finished[0]]


def observed_rates(rounds: Iterable[Round], tree: Tree, width: int) -> list[float]:
    """How often child j of a node on an accepted path is accepted, for j below `width`."""
    counts, seen = [0] * width, 0
    for round_ in rounds:
        if round_.drafted[0] != tree.nodes:  # a tree that the end of the output cut
            continue
        for parent, chosen in zip((-1, *round_.path[0]), (*round_.path[0], None), strict=True):
            children = tree.children[parent + 1]
            if len(children) < width:
                continue
            seen += 1
            if chosen in children:
                counts[children.index(chosen)] += 1
    if not seen:
        raise ValueError(
            "no round drafted a whole tree, so that no acceptance was measured; generate more "
            "tokens per request (--max-new-tokens)"
        )
    return [count / seen for count in counts]


def expected_tokens(tree: Tree, rates: Sequence[float]) -> float:
    """Tokens of a round, the target's own included: 1 and the product of rates of each path."""
    chances: list[float] = []
    for node, parent in enumerate(tree.parents):
        rank = tree.children[parent + 1].index(node)
        rate = rates[rank] if rank < len(rates) else 0.0
        chances.append(rate * (chances[parent] if parent >= 0 else 1.0))
    return 1 + sum(chances)


def _point(
    name: str, count: int, tree: Any, rates: Sequence[float], rounds: Sequence[Round]
) -> TreePoint:
    if not rounds:
        raise ValueError(
            f"{name} of {count} nodes drafted in no round that was kept whole; generate more "
            "tokens per request (--max-new-tokens)"
        )
    return TreePoint(
        name,
        count,
        fmean(one.drafted[0] for one in rounds),
        fmean(one.depth for one in rounds),
        expected_tokens(tree, rates) if isinstance(tree, Tree) else None,
        fmean(one.accepted[0] + 1 for one in rounds),
        len(rounds),
    )
