"""Trees under independent heads: the most probable of all paths.

Heads that predict several tokens at once give every depth one distribution, whatever its prefix, so
the probability of a path is the product of its tokens, and the best `nodes` nodes are found without
another forward (the trees of Medusa, Cai et al. 2024, section 2.3.3, rebuilt in every round from
the distributions, as OPT-Tree, Wang et al. 2024, does with a distribution per node).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import DraftModel, DraftNodes, GrownDraft, Layout
from mmspec.drafters.trees.draws import ranking
from mmspec.drafters.trees.ranked_tree import RankedTree
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class ParallelTree(RankedTree):
    """The `nodes` most probable nodes of at most `depth` levels; every row grows its own tree.

    A node has at most `branch` children. Nodes are selected by identity, so proposals are DET or
    RACE, as in `DynamicTree`. Raises ValueError for invalid sizes and, at construction of the
    drafter, for a draft model whose distributions depend on the tokens before them.
    """

    nodes: int = 24
    depth: int = 8
    branch: int = 4
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    sizes: ClassVar[tuple[str, ...]] = ("nodes", "depth", "branch")

    def limit_depth(self, reach: int) -> ParallelTree:
        return replace(self, depth=min(self.depth, reach))

    def check(self, model: DraftModel) -> None:
        if not model.is_parallel:
            raise ValueError(
                f"the distributions of a {type(model).__name__} depend on the tokens before them, "
                'but a parallel tree needs independent heads (Medusa); give tree="dynamic"'
            )

    @property
    def description(self) -> str:
        return f"most probable {self.nodes} nodes of independent heads"

    def grow_levels(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, depth: int
    ) -> GrownDraft:
        first = model.predict_first(context, state)
        distributions = [first]
        scored = [ranking(first, kind, context.noise, context.position())]
        if depth > 1:
            steps = torch.arange(depth - 1, device=context.device)[None]
            visible = (steps <= steps.mT)[None]
            likeliest = scored[0].argmax(-1).expand(-1, depth - 1)
            distributions.append(
                model.predict(context, state, DraftNodes(likeliest, Layout(steps, visible)))
            )
            scored.append(
                ranking(distributions[1], kind, context.noise, context.position() + 1 + steps)
            )
        best = torch.cat(scored, 1).topk(min(self.branch, first.size), -1)
        tokens, scores = best.indices.tolist(), best.values.tolist()
        rows = [best_paths(row, self.nodes) for row in scores]
        return GrownDraft(_build_draft(context, tokens, rows, kind), [()], distributions)


def best_paths(scores: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """The best paths as ranks, parents first: `scores[d]` are log-probabilities, best first.

    distribution of depth 0   .6 .4        path    0    00    1    01   10
    distribution of depth 1   .7 .3        prob.   .6   .42   .4   .18  .28

    four nodes: 0, 00, 1, 10
    """
    waiting: list[tuple[float, tuple[int, ...]]] = [(-scores[0][0], (0,))]
    found: list[tuple[int, ...]] = []
    while waiting and len(found) < nodes:
        cost, path = heapq.heappop(waiting)
        found.append(path)
        depth, rank = len(path), path[-1]
        if depth < len(scores):
            heapq.heappush(waiting, (cost - scores[depth][0], (*path, 0)))
        own = scores[depth - 1]
        if rank + 1 < len(own) and own[rank + 1] > float("-inf"):
            heapq.heappush(waiting, (cost + own[rank] - own[rank + 1], (*path[:-1], rank + 1)))
    return found


def _build_draft(
    context: Context,
    tokens: Sequence[Sequence[Sequence[int]]],  # (B, depth, branch)
    rows: Sequence[Sequence[tuple[int, ...]]],
    kind: Kind,
) -> Draft:
    """The paths of every row as a draft; shorter rows are padded with their first token."""
    width = max(map(len, rows))
    token_rows, parent_rows = [], []
    for own, paths in zip(tokens, rows, strict=True):
        index = {path: node for node, path in enumerate(paths)}
        num_missing = width - len(paths)
        token_rows.append(
            [own[len(path) - 1][path[-1]] for path in paths] + [own[0][0]] * num_missing
        )
        parent_rows.append([index.get(path[:-1], -1) for path in paths] + [-1] * num_missing)
    device = context.device
    sizes = torch.tensor([[len(paths)] for paths in rows], device=device)
    mask = torch.arange(width, device=device) < sizes
    padded = any(len(paths) < width for paths in rows)
    parents = torch.tensor(parent_rows, device=device)
    return Draft(torch.tensor(token_rows, device=device), parents, mask, kind, padded=padded)
