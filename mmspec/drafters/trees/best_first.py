"""Best-first trees: of all paths that the drafter can say, the likeliest nodes.

A node lies as far from the context as its path is unlikely, -log q in nats. If the drafter is
right about its own chances, the nodes that lie nearest keep most tokens (OPT-Tree, Wang et al.
2024; DySpec, Xiong et al. 2024), and to find them is a search for shortest paths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmspec.draft import Kind
from mmspec.drafters.growth import DraftModel, Sprout
from mmspec.drafters.trees.forest import Forest, NextTokens
from mmspec.drafters.trees.ranked_tree import RankedTree
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class BestFirstTree(RankedTree):
    """The `nodes` nodes that lie nearest, none deeper than `depth`; every row grows its own.

    One forward of the draft model expands all nodes that lie within `step` nats of the nearest
    unexpanded one (delta-stepping, Meyer & Sanders 2003): 0 is Dijkstra's search, node by node;
    infinity goes level by level. A node has at most `branch` children, and of them those alone with
    at least `threshold` times the chance of the best (structural pruning, Spec-LLaVA); with a
    threshold above 1 that is the best, so a chain. Nodes are chosen by looking at them, so
    proposals are DET or RACE, as in `DynamicTree`. Raises ValueError for sizes that are none.
    """

    nodes: int = 32
    depth: int = 8
    step: float = 0.5
    branch: int = 8
    threshold: float = 0.0
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    sizes: ClassVar[tuple[str, ...]] = ("nodes", "depth", "branch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.step >= 0 and self.threshold >= 0):
            raise ValueError(
                f"step={self.step}, threshold={self.threshold}: neither may be below 0"
            )

    @property
    def words(self) -> str:
        return f"best-first tree of {self.nodes} nodes"

    def ranked(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, depth: int
    ) -> Sprout:
        forest = Forest(model, context, state, kind, min(self.branch, context.vocabulary))
        rows = [_Search(forest, row, depth) for row in range(context.batch)]
        for row, choice in zip(rows, forest.root(), strict=True):
            row.add(-1, choice, self.threshold)
        while any(wanted := [row.nearest(self.nodes, self.step) for row in rows]):
            for row, nodes, found in zip(rows, wanted, forest.read(wanted), strict=True):
                for node, choice in zip(nodes, found, strict=False):
                    row.add(node, choice, self.threshold)
        forest.keep([row.best(self.nodes) for row in rows])
        return forest.trees()


@dataclass
class _Search:
    """The nodes of one row, by distance."""

    forest: Forest
    row: int
    depth: int
    far: list[float] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)

    def add(self, parent: int, choice: NextTokens, threshold: float) -> None:
        """Children of a node: the best, and those that are likely enough beside it."""
        base = 0.0 if parent < 0 else self.far[parent]
        for token, log_prob in zip(choice.tokens, choice.log_probs, strict=True):
            likely = log_prob - choice.log_probs[0] >= _log(threshold)
            if (likely and log_prob > -math.inf) or token == choice.tokens[0]:
                self.forest.add(self.row, token, parent)
                self.far.append(base + max(-log_prob, 0.0))

    def nearest(self, most: int, step: float) -> list[int]:
        """Unread nodes to expand next; none once all that could be among the best are known."""
        deep = self.forest.depths[self.row]
        unread = [
            node
            for node in self.best(most)
            if node not in self.asked and deep[node] + 1 < self.depth
        ]
        if not unread:
            return []
        first = min(unread, key=self.far.__getitem__)
        limit = self.far[first] + step
        chosen = [node for node in unread if self.far[node] <= limit] if step else [first]
        self.asked.update(chosen)
        return chosen

    def best(self, most: int) -> list[int]:
        """The nearest nodes, in the order they were found; a child never lies before its parent."""
        ranked = sorted(range(len(self.far)), key=lambda node: (self.far[node], node))
        return sorted(ranked[:most])


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
