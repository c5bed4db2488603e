"""The tree that makes most tokens per second on this machine, learned while decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.draft import Kind, Round
from mmspec.drafters.draws import draw
from mmspec.drafters.growth import Chain, DraftModel, News, Shape, Sprout, StaticTree
from mmspec.drafters.length import Fixed
from mmspec.drafters.timings import Timings
from mmspec.drafters.tree_budget import TreeBudget
from mmspec.laws.categorical import Categorical
from mmspec.recipe import TREE
from mmspec.targets.context import Context
from mmspec.trees import Tree

_OPENING = (3, 3, 1, 1, 6, 6)  # lengths of the first chains, for timings to tell sizes apart
_AGAIN = 128  # rounds until the tree is chosen anew; sooner at first, after 16, 32 and 64
_DECAY = 0.98
_PRIOR = (0.6, 0.15, 0.06, 0.03)  # chances by rank before anything was seen
_DOUBT = 2.0  # looks that the prior counts for
_LEVEL_DOUBT = 8.0  # looks at a level that those at all levels count for
_BEYOND = 1.5  # how far past the sizes that were timed a tree may go


@dataclass
class TreeHabits:
    """What `AutoTree` has learned: which rank of the drafter's is right, and what sizes cost."""

    ranks: list[float]  # how often the next token was the drafter's best, its second, ...
    looks: float = 0.0
    draft: Timings = field(default_factory=Timings)  # by levels
    verify: Timings = field(default_factory=Timings)  # of chains, by nodes
    branched: Timings = field(default_factory=Timings)  # of other trees, whose paths are moved
    levels: list[tuple[float, float]] = field(default_factory=list)  # best token right, and looks
    tree: Tree = field(default_factory=lambda: Tree.chain(_OPENING[0]))
    batch: int = 0
    rounds: int = 0
    best: Tensor | None = None  # (B, n, K) what the drafter ranked first at what it read

    def copy(self) -> TreeHabits:
        draft, verify, branched = map(Timings, (self.draft, self.verify, self.branched))
        again = replace(self, ranks=list(self.ranks), levels=list(self.levels), best=None)
        again.draft, again.verify, again.branched = draft, verify, branched
        return again

    def rates(self) -> tuple[float, ...]:
        """The chance that child j is right, by rank; alike at all nodes."""
        whole = self.looks + _DOUBT
        pairs = zip(self.ranks, _PRIOR, strict=False)
        return tuple((seen + _DOUBT * prior) / whole for seen, prior in pairs)

    def chains(self, longest: int) -> list[float]:
        """Expected tokens of a round with a chain of 0, 1, ... drafted tokens.

        Drafters err more often further ahead, so the best token's chance is that of its level.
        """
        found, kept, everywhere = [1.0], 1.0, self.rates()[0]
        for level in range(longest):
            right, looks = self.levels[level] if level < len(self.levels) else (0.0, 0.0)
            kept *= (right + _LEVEL_DOUBT * everywhere) / (looks + _LEVEL_DOUBT)
            found.append(found[-1] + kept)
        return found

    def saw(self, level: int, rank: int | None) -> None:
        """Which rank of the drafter's was right at that level; None = none of those known."""
        self.ranks = [_DECAY * count for count in self.ranks]
        self.looks = _DECAY * self.looks + 1
        if rank is not None:
            self.ranks[rank] += 1
        self.levels += [(0.0, 0.0)] * (level + 1 - len(self.levels))
        right, looks = self.levels[level]
        self.levels[level] = (_DECAY * right + (rank == 0), _DECAY * looks + 1)


@dataclass(eq=False)
class AutoTree(Shape):
    """The tree with most expected tokens per second, by measured acceptance and measured cost.

    Every token that the target says is looked up among the `width` that the drafter ranked first,
    whether or not they were proposed; so chains, too, teach what a second child would be worth.
    Sequoia's programme (`TreeBudget`) then gives the best tree of every size, and the times of
    rounds which size pays: on a processor, where every node costs, mostly a chain. Chains of all
    lengths are among the trees looked at, and grow as chains. Chosen anew after 6, 16, 32, 64 and
    every 128 rounds; `learned` outlives a request. Raises ValueError for sizes below 1.
    """

    nodes: int = 32
    depth: int = 16
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

    def within(self, reach: int) -> AutoTree:
        return replace(self, depth=min(self.depth, reach))

    def begin(self) -> TreeHabits:
        return self.learned.copy()

    def grow(
        self, model: DraftModel, context: Context, state: Any, own: TreeHabits, kind: Kind
    ) -> Sprout:
        tree = own.tree
        shape = Chain(Fixed(tree.nodes)) if tree.is_chain else StaticTree(tree)
        sprout = shape.grow(model, context, state, None, kind)
        own.best = _ranked(sprout, self.width, kind, context)
        return sprout

    def observe(self, own: TreeHabits, news: News) -> TreeHabits:
        _time(own, news.kept)
        if own.best is not None:
            for level, rank in _ranks(own.best.tolist(), news):
                own.saw(level, rank)
        own.rounds += 1
        if own.rounds < len(_OPENING):
            own.tree = Tree.chain(min(_OPENING[own.rounds], self.depth))
        elif own.verify and (own.rounds % _AGAIN == 0 or own.rounds in (len(_OPENING), 16, 32, 64)):
            own.tree = self.choose(own)
        self.learned = own
        return own

    def choose(self, own: TreeHabits) -> Tree:
        """The best tree by what is known now; no larger than half as much again as was timed."""
        most = min(self.nodes, int(_BEYOND * max(own.verify, default=1)) + 1)
        deepest = min(self.depth, int(_BEYOND * max(own.draft, default=1)) + 1)
        budget = TreeBudget(own.rates(), most, deepest)
        tokens, chains = budget.tokens(), own.chains(deepest)
        speeds: dict[tuple[int, int], float] = {}
        for depth in range(1, deepest + 1):
            draft = own.draft.cost(depth)
            speeds[depth, depth] = chains[depth] / (draft + own.verify.cost(depth))
            share = chains[depth] / tokens[depth, min(depth, most)]  # of what alike levels promise
            for nodes in range(depth + 1, most + 1):
                verify = (own.branched or own.verify).cost(nodes)
                speeds[depth, nodes] = min(1.0, share) * tokens[depth, nodes] / (draft + verify)
        depth, nodes = max(speeds, key=speeds.__getitem__)
        return Tree.chain(depth) if nodes == depth else budget.tree(nodes, depth)


def _ranked(sprout: Sprout, width: int, kind: Kind, context: Context) -> Tensor | None:
    """What the drafter would have proposed first at every place it read: (B, n, K)."""
    if not sprout.draft.nodes:
        return None
    laws, position = Categorical.cat(sprout.laws), context.position()
    levels = [depth for depth, law in enumerate(sprout.laws) for _ in range(law.batch[1])]
    index = torch.arange(len(levels), device=context.device)
    places = position + torch.tensor(levels, device=context.device)
    return draw(laws, min(width, laws.size), kind, context.noise, places, index)


def _ranks(best: Sequence[Sequence[Sequence[int]]], news: News) -> Iterator[tuple[int, int | None]]:
    """Level and rank of every token that the target said behind a place the drafter had read."""
    for row, finished in enumerate(news.kept.finished):
        if finished:
            continue
        places = [0, *(place + 1 for place in news.read[row])]
        for level, (place, token) in enumerate(zip(places, news.kept.tokens[row], strict=False)):
            found = best[row][place]
            yield level, found.index(token) if token in found else None


def _time(own: TreeHabits, kept: Round) -> None:
    if own.batch != len(kept.drafted):  # timings of another batch size say nothing
        own.draft, own.verify, own.branched = Timings(), Timings(), Timings()
        own.batch = len(kept.drafted)
    nodes = max(kept.drafted, default=0)
    if nodes and kept.depth:
        own.draft.add(kept.depth, kept.seconds.get("draft", 0.0))
        verify = own.verify if nodes == kept.depth else own.branched
        verify.add(nodes, kept.seconds.get("verify", 0.0) + kept.seconds.get("host", 0.0))
