"""Proactive drafting: further candidates beside the first tokens of a Jacobi window (SJD-PAC).

depth 2, width 3     node 0 . 1 . 2          the chain is 0 3 6 7, the others are leaves
                          |
                          3 . 4 . 5
                          |
                          6 - 7
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind
from mmspec.trees import Tree

SIBLINGS = Lane.OTHER + 2  # the lane of the draws made here


@dataclass(frozen=True)
class Proactive:
    """`width` candidates at each of the first `depth` slots (Kang et al. 2026).

    They are drawn without replacement; the first one is the window's own token and goes on as the
    chain, the others are leaves. Exact with rejection sampling that knows siblings (`Recursive`).
    Reconstructed: the paper gives depth 3 and width 4, but not which candidates have children.
    `width=1` is a chain.
    """

    depth: int = 3
    width: int = 4

    def __post_init__(self) -> None:
        if self.depth < 1 or self.width < 1:
            raise ValueError(
                f"depth={self.depth} and width={self.width} make no tree; give 1 or more of both"
            )

    def spread(self, tokens: Tensor, distribution: Categorical, noise: Noise) -> Draft:
        """The window `tokens` (B, N) with its siblings, drawn from its `distribution` (B, N).

        Slots whose distribution is a point mass have none, unless it is the target's own (greedy):
        then its next best tokens are candidates.
        """
        depth = min(self.depth, tokens.shape[1])
        count = min(self.width, distribution.size) - 1
        first = tokens[:, :depth, None]
        rest = Categorical(
            distribution.scores[:, :depth].scatter(-1, first, -torch.inf), distribution.hard
        )
        slots = torch.arange(depth, device=tokens.device)
        best = rest.perturbed(noise.fresh(SIBLINGS, slots)).topk(count, -1)
        nodes = torch.cat((first, best.indices), -1).flatten(1)
        real = torch.cat((torch.ones_like(first).bool(), best.values > -torch.inf), -1).flatten(1)
        behind = tokens[:, depth:]
        tree, slot = _tree(depth, count + 1, tokens.shape[1])
        return Draft.of(
            tree,
            torch.cat((nodes, behind), 1),
            Kind.WOR,
            distribution[:, list(slot)],
            torch.cat((real, torch.ones_like(behind).bool()), 1),
        )

    def chain(self, nodes: int, size: int) -> list[int]:
        """Which of the `nodes` of a spread window are the chain, `size` being the vocabulary."""
        width = min(self.width, size)
        ranks = range(nodes)
        return [node for node in ranks if node >= self.depth * width or node % width == 0]


@lru_cache(maxsize=64)
def _tree(depth: int, width: int, length: int) -> tuple[Tree, tuple[int, ...]]:
    """The topology, and the slot of the window that each node stands at."""
    parents, slots, last = list[int](), list[int](), -1
    for slot in range(length):
        first = len(parents)
        siblings = width if slot < depth else 1
        parents += [last] * siblings
        slots += [slot] * siblings
        last = first
    return Tree(tuple(parents)), tuple(slots)
