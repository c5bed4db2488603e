"""Proactive drafting: additional candidates for the first tokens of a Jacobi window (SJD-PAC).

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

SIBLINGS = Lane.OTHER + 2  # noise lane of these draws


@dataclass(frozen=True)
class ProactiveTree:
    """`width` candidates in each of the first `depth` slots (Kang et al. 2026).

    They are drawn without replacement; the first is the window's own token and continues the chain,
    the others are leaves. Exact with rejection sampling over siblings (`Recursive`). Reconstructed:
    the paper gives depth 3 and width 4, but not which candidates have children. `width=1` is a
    chain.
    """

    depth: int = 3
    width: int = 4

    def __post_init__(self) -> None:
        if self.depth < 1 or self.width < 1:
            raise ValueError(
                f"depth={self.depth} and width={self.width} are not the size of a tree; give 1 or "
                "more for both"
            )

    def spread(self, tokens: Tensor, distribution: Categorical, noise: Noise) -> Draft:
        """The window `tokens` (B, N) with siblings drawn from its `distribution` (B, N).

        Slots whose distribution is a point mass have none, unless it is the target's own (greedy):
        then the target's next best tokens are candidates.
        """
        depth = min(self.depth, tokens.shape[1])
        count = min(self.width, distribution.size) - 1
        first = tokens[:, :depth, None]
        rest = Categorical(
            distribution.scores[:, :depth].scatter(-1, first, -torch.inf), distribution.hard
        )
        slots = torch.arange(depth, device=tokens.device)
        best = rest.perturb(noise.fresh_keys(SIBLINGS, slots)).topk(count, -1)
        nodes = torch.cat((first, best.indices), -1).flatten(1)
        real = torch.cat((torch.ones_like(first).bool(), best.values > -torch.inf), -1).flatten(1)
        rest_tokens = tokens[:, depth:]
        tree, slot = _tree(depth, count + 1, tokens.shape[1])
        return Draft.from_tree(
            tree,
            torch.cat((nodes, rest_tokens), 1),
            Kind.WOR,
            distribution[:, list(slot)],
            torch.cat((real, torch.ones_like(rest_tokens).bool()), 1),
        )

    def chain(self, nodes: int, size: int) -> list[int]:
        """Indices of the chain among the `nodes` of a spread window; `size` is the vocabulary."""
        width = min(self.width, size)
        ranks = range(nodes)
        return [node for node in ranks if node >= self.depth * width or node % width == 0]


@lru_cache(maxsize=64)
def _tree(depth: int, width: int, length: int) -> tuple[Tree, tuple[int, ...]]:
    """The topology, and the window slot of each node."""
    parents, slots, last = list[int](), list[int](), -1
    for slot in range(length):
        first = len(parents)
        siblings = width if slot < depth else 1
        parents += [last] * siblings
        slots += [slot] * siblings
        last = first
    return Tree(tuple(parents)), tuple(slots)
