"""Trees under distributions that do not hear each other: of all paths, the likeliest.

Heads that say several tokens at once give every depth one distribution, whatever stands before it,
so a path is as likely as the product of its tokens, and the best `nodes` nodes are found without
asking the draft model again (Medusa's trees, Cai et al. 2024, section 2.3.3, made anew in every
round from the distributions themselves, as OPT-Tree, Wang et al. 2024, makes them from a
distribution per node).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mmspec.draft import Draft, Kind
from mmspec.drafters.growth import DraftModel, Layout, Nodes, Sprout
from mmspec.drafters.trees.draws import ranking
from mmspec.drafters.trees.ranked_tree import RankedTree
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class ParallelTree(RankedTree):
    """The `nodes` likeliest nodes of at most `depth` levels; every row grows its own.

    A node has at most `branch` children. Nodes are chosen by looking at them, so proposals are DET
    or RACE, as in `DynamicTree`. Raises ValueError for sizes that are none, and, when it is bound,
    for a draft model whose distributions hear the tokens before them.
    """

    nodes: int = 24
    depth: int = 8
    branch: int = 4
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    sizes: ClassVar[tuple[str, ...]] = ("nodes", "depth", "branch")

    def within(self, reach: int) -> ParallelTree:
        return replace(self, depth=min(self.depth, reach))

    def check(self, model: DraftModel) -> None:
        if not model.parallel:
            raise ValueError(
                f"the distributions of a {type(model).__name__} go by the tokens before them, and a "
                'parallel tree is for those that do not (Medusa heads); give tree="dynamic"'
            )

    @property
    def words(self) -> str:
        return f"likeliest {self.nodes} nodes under parallel distributions"

    def ranked(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, depth: int
    ) -> Sprout:
        first = model.predict_first(context, state)
        distributions = [first]
        scored = [ranking(first, kind, context.noise, context.position())]
        if depth > 1:
            steps = torch.arange(depth - 1, device=context.device)[None]
            visible = (steps <= steps.mT)[None]
            spoken = scored[0].argmax(-1).expand(-1, depth - 1)
            distributions.append(
                model.predict(context, state, Nodes(spoken, Layout(steps, visible)))
            )
            scored.append(
                ranking(distributions[1], kind, context.noise, context.position() + 1 + steps)
            )
        best = torch.cat(scored, 1).topk(min(self.branch, first.size), -1)
        tokens, scores = best.indices.tolist(), best.values.tolist()
        rows = [likeliest(row, self.nodes) for row in scores]
        return Sprout(_forest(context, tokens, rows, kind), [()], distributions)


def likeliest(scores: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """The best paths of ranks, parents first: `scores[d]` are log-probabilities, best first.

    distribution of depth 0   .6 .4        path    0    00    1    01   10
    distribution of depth 1   .7 .3        chance  .6   .42   .4   .18  .28    four nodes: 0, 00, 1,
    10
    """
    waiting: list[tuple[float, tuple[int, ...]]] = [(-scores[0][0], (0,))]
    found: list[tuple[int, ...]] = []
    while waiting and len(found) < nodes:
        far, path = heapq.heappop(waiting)
        found.append(path)
        depth, rank = len(path), path[-1]
        if depth < len(scores):
            heapq.heappush(waiting, (far - scores[depth][0], (*path, 0)))
        own = scores[depth - 1]
        if rank + 1 < len(own) and own[rank + 1] > float("-inf"):
            heapq.heappush(waiting, (far + own[rank] - own[rank + 1], (*path[:-1], rank + 1)))
    return found


def _forest(
    context: Context,
    tokens: Sequence[Sequence[Sequence[int]]],  # (B, depth, branch)
    rows: Sequence[Sequence[tuple[int, ...]]],
    kind: Kind,
) -> Draft:
    """The paths of every row as a draft; shorter rows are padded with their first token."""
    width = max(map(len, rows))
    said, above = [], []
    for own, paths in zip(tokens, rows, strict=True):
        index = {path: node for node, path in enumerate(paths)}
        more = width - len(paths)
        said.append([own[len(path) - 1][path[-1]] for path in paths] + [own[0][0]] * more)
        above.append([index.get(path[:-1], -1) for path in paths] + [-1] * more)
    device = context.device
    sizes = torch.tensor([[len(paths)] for paths in rows], device=device)
    mask = torch.arange(width, device=device) < sizes
    padded = any(len(paths) < width for paths in rows)
    where = torch.tensor(above, device=device)
    return Draft(torch.tensor(said, device=device), where, mask, kind, padded=padded)
