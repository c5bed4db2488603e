"""Best-first trees: the most probable nodes of all paths that the drafter can generate.

The distance of a node from the context is -log q of its path, in nats. If the drafter is
calibrated, the nearest nodes have the highest expected number of accepted tokens (OPT-Tree, Wang et
al. 2024; DySpec, Xiong et al. 2024), and finding them is a shortest-path search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmspec.draft import Kind
from mmspec.drafters.draft_model import DraftModel, GrownDraft
from mmspec.drafters.trees.forest import Forest, NextTokens
from mmspec.drafters.trees.ranked_tree import RankedTree
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class BestFirstTree(RankedTree):
    """The `nodes` nearest nodes, none deeper than `depth`; every row grows its own tree.

    One forward of the draft model expands all nodes within `step` nats of the nearest unexpanded
    one (delta-stepping, Meyer & Sanders 2003): 0 is Dijkstra's search, node by node; infinity goes
    level by level. A node has at most `branch` children: the best, and those with at least
    `threshold` times its probability (structural pruning, Spec-LLaVA); a threshold above 1 gives a
    chain. No node is further than `farthest` nats, except the best child of an expanded one. Nodes
    are selected by identity, so proposals are DET or RACE, as in `DynamicTree`. Raises ValueError
    for invalid sizes.
    """

    nodes: int = 32
    depth: int = 8
    step: float = 0.5
    branch: int = 8
    threshold: float = 0.0
    farthest: float = math.inf
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    sizes: ClassVar[tuple[str, ...]] = ("nodes", "depth", "branch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.step >= 0 and self.threshold >= 0 and self.farthest >= 0):
            raise ValueError(
                f"step={self.step}, threshold={self.threshold}, farthest={self.farthest}: none may "
                "be below 0"
            )

    @property
    def description(self) -> str:
        return f"best-first tree of {self.nodes} nodes"

    def grow_levels(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, depth: int
    ) -> GrownDraft:
        forest = Forest(model, context, state, kind, min(self.branch, context.vocabulary))
        rows = [_Search(forest, row, depth, self.farthest) for row in range(context.batch)]
        for row, choice in zip(rows, forest.root(), strict=True):
            row.add(-1, choice, self.threshold)
        while any(nodes_per_row := [row.nearest(self.nodes, self.step) for row in rows]):
            for row, nodes, found in zip(
                rows, nodes_per_row, forest.read(nodes_per_row), strict=True
            ):
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
    farthest: float  # nats
    distances: list[float] = field(default_factory=list)
    expanded: set[int] = field(default_factory=set)

    def add(self, parent: int, choice: NextTokens, threshold: float) -> None:
        """Add the children of a node: the best, and those that are probable enough."""
        base = 0.0 if parent < 0 else self.distances[parent]
        for token, log_prob in zip(choice.tokens, choice.log_probs, strict=True):
            likely = log_prob - choice.log_probs[0] >= _log(threshold)
            likely = likely and -math.inf < log_prob and base - log_prob <= self.farthest
            if likely or token == choice.tokens[0]:
                self.forest.add(self.row, token, parent)
                self.distances.append(base + max(-log_prob, 0.0))

    def nearest(self, max_nodes: int, step: float) -> list[int]:
        """Unread nodes to expand next; none once all candidates for the best nodes are known."""
        depths = self.forest.depths[self.row]
        unread = [
            node
            for node in self.best(max_nodes)
            if node not in self.expanded
            and depths[node] + 1 < self.depth
            and self.distances[node] <= self.farthest
        ]
        if not unread:
            return []
        first = min(unread, key=self.distances.__getitem__)
        limit = self.distances[first] + step
        selected = [node for node in unread if self.distances[node] <= limit] if step else [first]
        self.expanded.update(selected)
        return selected

    def best(self, max_nodes: int) -> list[int]:
        """The nearest nodes, in the order they were added; parents come before their children."""
        grow_levels = sorted(
            range(len(self.distances)), key=lambda node: (self.distances[node], node)
        )
        return sorted(grow_levels[:max_nodes])


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
