"""The tree of a given size with the most expected tokens, if children are accepted by rank.

Chen et al. 2024, "Sequoia: scalable, robust, and hardware-aware speculative decoding", section 4.1:
a dynamic programme over nodes, depth and children of the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mmspec.trees import Tree


class TreeBudget:
    """The best trees of up to `nodes` drafted nodes and `depth` drafted levels.

    `rates[j]` is the probability that child j of a node is accepted while those before it are not,
    the same at all nodes; no node has more children than there are rates. Raises ValueError for
    rates that are not such probabilities and for sizes below 1.
    """

    def __init__(self, rates: Sequence[float], nodes: int, depth: int) -> None:
        if not rates or min(rates) < 0 or sum(rates) > 1 + 1e-9:
            raise ValueError(
                f"rates={list(rates)} are not probabilities of disjoint events; give values of at "
                "least 0 that sum to at most 1"
            )
        if nodes < 1 or depth < 1:
            raise ValueError(f"nodes={nodes}, depth={depth}: both must be at least 1")
        self.rates = tuple(float(one) for one in rates)
        # [l, m, b]: most tokens of a tree with m nodes below its root, at most l levels of them,
        # and b children of the root; the root's own token is counted
        self._table = np.full((depth + 1, nodes + 1, len(self.rates) + 1), -np.inf)
        self._table[:, 0, 0] = 1.0
        for level in range(1, depth + 1):
            below = self._table[level - 1].max(-1)
            for children in range(1, len(self.rates) + 1):
                for count in range(1, nodes + 1):
                    expected = self._split_nodes(level, children, count, below)
                    self._table[level, count, children] = expected.max()

    def _split_nodes(self, level: int, children: int, count: int, below: np.ndarray) -> np.ndarray:
        """Expected tokens where the last subtree has count, count - 1, ..., 1 nodes."""
        rest, last = self._table[level, :count, children - 1], below[count - 1 :: -1][:count]
        rate = self.rates[children - 1]  # 0 of an impossible subtree would not be a number
        reached = rate * last if rate else np.where(np.isfinite(last), 0.0, last)
        total: np.ndarray = rest + reached
        return total

    def tokens(self) -> np.ndarray:  # (depth + 1, nodes + 1)
        """Expected tokens of a round, including the target's own, by maximal levels and nodes."""
        return np.maximum.accumulate(self._table.max(-1), axis=1)

    def tree(self, nodes: int, depth: int) -> Tree:
        """The best tree of at most so many nodes and levels; children are ordered by rank."""
        parents: list[int] = []
        self._grow(parents, -1, depth, int(self._table[depth, : nodes + 1].max(-1).argmax()))
        return _by_levels(tuple(parents))

    def _grow(self, parents: list[int], root: int, level: int, nodes: int) -> None:
        """Append the subtrees of `root`, in the order of its children."""
        shares: list[int] = []
        below = self._table[level - 1].max(-1)
        for children in range(int(self._table[level, nodes].argmax()), 0, -1):
            left = int(self._split_nodes(level, children, nodes, below).argmax())
            shares.append(nodes - left - 1)
            nodes = left
        for share in reversed(shares):
            parents.append(root)
            self._grow(parents, len(parents) - 1, level - 1, share)


@lru_cache(maxsize=256)
def _by_levels(parents: tuple[int, ...]) -> Tree:
    """The same tree with its nodes ordered by level."""
    tree = Tree(parents)
    order = sorted(range(tree.nodes), key=lambda node: tree.depths[node])
    place = {node: index for index, node in enumerate(order)} | {-1: -1}
    return Tree(tuple(place[parents[node]] for node in order))
