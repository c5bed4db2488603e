"""The tree that makes most tokens per second on this machine, learned while decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.draft import Kind, Round
from mmspec.drafters.draws import draw
from mmspec.drafters.growth import DraftModel, News, Shape, Sprout, StaticTree
from mmspec.drafters.timings import Timings
from mmspec.drafters.tree_budget import TreeBudget
from mmspec.recipe import TREE
from mmspec.targets.context import Context
from mmspec.trees import Tree

_OPENING = (3, 3, 1, 1, 6, 6)  # lengths of the first chains, for timings to tell sizes apart
_AGAIN = 16  # rounds until the tree is chosen anew
_DECAY = 0.98
_PRIOR = (0.6, 0.15, 0.06, 0.03)  # chances by rank before anything was seen
_DOUBT = 2.0  # looks that the prior counts for
_BEYOND = 1.5  # how far past the sizes that were timed a tree may go


@dataclass
class TreeHabits:
    """What `AutoTree` has learned: which rank of the drafter's is right, and what sizes cost."""

    ranks: list[float]  # how often the next token was the drafter's best, its second, ...
    looks: float = 0.0
    draft: Timings = field(default_factory=Timings)  # by levels
    verify: Timings = field(default_factory=Timings)  # by nodes
    tree: Tree = field(default_factory=lambda: Tree.chain(_OPENING[0]))
    batch: int = 0
    rounds: int = 0
    best: Tensor | None = None  # (B, n, K) what the drafter ranked first at what it read

    def copy(self) -> TreeHabits:
        draft, verify = Timings(self.draft), Timings(self.verify)
        return replace(self, ranks=list(self.ranks), draft=draft, verify=verify, best=None)

    def rates(self) -> tuple[float, ...]:
        """The chance that child j is right, by rank; alike at all nodes."""
        whole = self.looks + _DOUBT
        pairs = zip(self.ranks, _PRIOR, strict=False)
        return tuple((seen + _DOUBT * prior) / whole for seen, prior in pairs)


@dataclass(eq=False)
class AutoTree(Shape):
    """The tree with most expected tokens per second, by measured acceptance and measured cost.

    Every token that the target says is looked up among the `width` that the drafter ranked first,
    whether or not they were proposed; so chains, too, teach what a second child would be worth.
    Sequoia's programme (`TreeBudget`) then gives the best tree of every size, and the times of
    rounds which size pays: on a processor, where every node costs, mostly a chain, which is one of
    the trees looked at. Chosen anew every 16 rounds; `learned` outlives a request. Raises
    ValueError for sizes below 1.
    """

    nodes: int = 32
    depth: int = 8
    width: int = 4
    learned: TreeHabits = field(init=False, repr=False)
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    walk: ClassVar[str] = TREE

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth) < 1 or not 1 <= self.width <= len(_PRIOR):
            raise ValueError(
                f"nodes={self.nodes}, depth={self.depth}, width={self.width}: give 1 or more "
                f"nodes and levels, and a width within 1..{len(_PRIOR)}"
            )
        self.learned = TreeHabits([0.0] * self.width)

    @property
    def words(self) -> str:
        return f"tree of at most {self.nodes} nodes, as it pays"

    @property
    def longest(self) -> int:
        return self.depth

    def begin(self) -> TreeHabits:
        return self.learned.copy()

    def grow(
        self, model: DraftModel, context: Context, state: Any, own: TreeHabits, kind: Kind
    ) -> Sprout:
        sprout = StaticTree(own.tree).grow(model, context, state, None, kind)
        own.best = _ranked(sprout, self.width, kind, context)
        return sprout

    def observe(self, own: TreeHabits, news: News) -> TreeHabits:
        _time(own, news.kept)
        if own.best is not None:
            for rank in _ranks(own.best.tolist(), news):
                own.ranks = [_DECAY * count for count in own.ranks]
                own.looks = _DECAY * own.looks + 1
                if rank is not None:
                    own.ranks[rank] += 1
        own.rounds += 1
        if own.rounds < len(_OPENING):
            own.tree = Tree.chain(min(_OPENING[own.rounds], self.depth))
        elif own.verify and (own.rounds % _AGAIN == 0 or own.rounds == len(_OPENING)):
            own.tree = self.choose(own)
        self.learned = own
        return own

    def choose(self, own: TreeHabits) -> Tree:
        """The best tree by what is known now; no larger than half as much again as was timed."""
        most = min(self.nodes, int(_BEYOND * max(own.verify, default=1)) + 1)
        deepest = min(self.depth, int(_BEYOND * max(own.draft, default=1)) + 1)
        budget = TreeBudget(own.rates(), most, deepest)
        tokens = budget.tokens()
        speeds = {
            (depth, nodes): tokens[depth, nodes] / (own.draft.cost(depth) + own.verify.cost(nodes))
            for depth in range(1, deepest + 1)
            for nodes in range(depth, most + 1)
        }
        depth, nodes = max(speeds, key=speeds.__getitem__)
        return budget.tree(nodes, depth)


def _ranked(sprout: Sprout, width: int, kind: Kind, context: Context) -> Tensor | None:
    """What the drafter would have proposed first at every place it read: (B, n, K)."""
    if not sprout.draft.nodes:
        return None
    position, found = context.position(), []
    for depth, law in enumerate(sprout.laws):
        index = torch.arange(law.batch[1], device=context.device)
        most = min(width, law.size)
        found.append(draw(law, most, kind, context.noise, position + depth, index))
    return torch.cat(found, 1)


def _ranks(best: Sequence[Sequence[Sequence[int]]], news: News) -> Iterator[int | None]:
    """The rank of every token that the target said behind a place that the drafter had read."""
    for row, finished in enumerate(news.kept.finished):
        if finished:
            continue
        places = [0, *(place + 1 for place in news.read[row])]
        for place, token in zip(places, news.kept.tokens[row], strict=False):
            found = best[row][place]
            yield found.index(token) if token in found else None


def _time(own: TreeHabits, kept: Round) -> None:
    if own.batch != len(kept.drafted):  # timings of another batch size say nothing
        own.draft, own.verify, own.batch = Timings(), Timings(), len(kept.drafted)
    nodes = max(kept.drafted, default=0)
    if nodes and kept.depth:
        own.draft.add(kept.depth, kept.seconds.get("draft", 0.0))
        own.verify.add(nodes, kept.seconds.get("verify", 0.0) + kept.seconds.get("host", 0.0))
