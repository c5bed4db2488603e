"""The tree that makes most tokens per second on this machine, learned while decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind, Round
from mmspec.drafters.growth import Chain, DraftModel, News, Shape, Sprout, StaticTree
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lengths.linear_timings import LinearTimings
from mmspec.drafters.trees.draws import draw
from mmspec.drafters.trees.tree_budget import TreeBudget
from mmspec.recipe import TREE
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree

_OPENING = (3, 3, 1, 1, 6, 6)  # lengths of the first chains, for timings to tell sizes apart
_AGAIN = 128  # rounds until the tree is chosen anew; sooner at first, after 16, 32 and 64
_DECAY = 0.98
_PRIOR = (0.6, 0.15, 0.06, 0.03)  # chances by rank before anything was seen
_DOUBT = 2.0  # looks that the prior counts for
_LEVEL_DOUBT = 8.0  # looks at a level that those at all levels count for
_TRIED = 32  # in one round of so many a chain half as long is timed
_BEYOND = 1.5  # how far past the sizes that were timed a tree may go


@dataclass
class TreeHabits:
    """What `AutoTree` has learned: which rank of the drafter's is right, and what sizes cost."""

    ranks: list[float]  # how often the next token was the drafter's best, its second, ...
    looks: float = 0.0
    draft: LinearTimings = field(default_factory=partial(LinearTimings, True))  # by levels
    verify: LinearTimings = field(default_factory=LinearTimings)  # of chains, by nodes
    branched: LinearTimings = field(default_factory=LinearTimings)  # of trees: paths are moved
    levels: list[tuple[float, float]] = field(default_factory=list)  # best token right, and looks
    tree: Tree = field(default_factory=lambda: Tree.chain(_OPENING[0]))
    batch: int = 0
    rounds: int = 0
    best: Tensor | None = None  # (B, n, K) what the drafter ranked first at what it read

    def copy(self) -> TreeHabits:
        again = replace(self, ranks=list(self.ranks), levels=list(self.levels), best=None)
        again.draft, again.verify = self.draft.copy(), self.verify.copy()
        again.branched = self.branched.copy()
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
        if own.rounds % _TRIED == _TRIED - 1 and own.rounds > len(_OPENING):
            tree = Tree.chain(max(1, tree.depth // 2))
        shape = Chain(Fixed(tree.nodes)) if tree.is_chain else StaticTree(tree)
        sprout = shape.grow(model, context, state, None, kind)
        is_known = tree.is_chain and all(
            distribution.hard for distribution in sprout.distributions
        )  # by where it broke off
        own.best = None if is_known else _ranked(sprout, self.width, kind, context)
        return sprout

    def observe(self, own: TreeHabits, news: News) -> TreeHabits:
        _time(own, news.kept)
        if own.best is not None:
            seen = _ranks(own.best.tolist(), news)
        else:
            seen = _ranks_of_chain(news, self.width)
        for level, rank in seen:
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
        largest = max(own.verify.largest, own.branched.largest)
        most = min(self.nodes, int(_BEYOND * largest) + 1)
        deepest = min(self.depth, int(_BEYOND * own.draft.largest) + 1)
        budget = TreeBudget(own.rates(), most, deepest)
        tokens, chains = budget.tokens(), own.chains(deepest)
        (_, level), (round_, node) = own.draft.line(), own.verify.line()
        branched, kid = own.branched.line() if own.branched else (round_, node)
        speeds: dict[tuple[int, int], float] = {}
        for depth in range(1, deepest + 1):
            speeds[depth, depth] = chains[depth] / (level * depth + round_ + node * depth)
            share = chains[depth] / tokens[depth, min(depth, most)]  # of what alike levels promise
            for nodes in range(depth + 1, most + 1):
                seconds = level * depth + branched + max(kid, node) * nodes
                speeds[depth, nodes] = min(1.0, share) * tokens[depth, nodes] / seconds
        depth, nodes = max(speeds, key=speeds.__getitem__)
        return Tree.chain(depth) if nodes == depth else budget.tree(nodes, depth)


def _ranked(sprout: Sprout, width: int, kind: Kind, context: Context) -> Tensor | None:
    """What the drafter would have proposed first at every place it read: (B, n, K)."""
    if not sprout.draft.nodes:
        return None
    distributions, position = Categorical.cat(sprout.distributions), context.position()
    levels = [
        depth
        for depth, distribution in enumerate(sprout.distributions)
        for _ in range(distribution.batch[1])
    ]
    index = torch.arange(len(levels), device=context.device)
    places = position + torch.tensor(levels, device=context.device)
    return draw(distributions, min(width, distributions.size), kind, context.noise, places, index)


def _ranks(best: Sequence[Sequence[Sequence[int]]], news: News) -> Iterator[tuple[int, int | None]]:
    """Level and rank of every token that the target said behind a place the drafter had read.

    Behind the end of an answer nothing is right.
    """
    for row, said in enumerate(news.kept.tokens):
        places = [0, *(place + 1 for place in news.read[row])]
        for level, (place, token) in enumerate(zip(places, said, strict=False)):
            found = best[row][place]
            yield level, found.index(token) if token in found else None
        if 0 < len(said) < len(places) and news.kept.finished[row]:
            yield len(said), None


def _ranks_of_chain(news: News, width: int) -> Iterator[tuple[int, int | None]]:
    """The same for a greedy chain: only the distribution behind its accepted tokens is looked at."""
    for row, said in enumerate(news.kept.tokens):
        accepted = len(news.kept.path[row])
        yield from ((level, 0) for level in range(accepted))
        if not said or accepted >= len(news.distributions):
            continue
        if accepted == len(said):  # the answer ended on a drafted token
            yield accepted, None
            continue
        scores = news.distributions[accepted].scores[row, 0]
        best = scores.topk(min(width, len(scores))).indices.tolist()
        yield accepted, best.index(said[accepted]) if said[accepted] in best else None


def _time(own: TreeHabits, kept: Round) -> None:
    if own.batch != len(kept.drafted):  # timings of another batch size say nothing
        own.draft, own.verify = LinearTimings(True), LinearTimings()
        own.branched = LinearTimings()
        own.batch = len(kept.drafted)
    nodes = max(kept.drafted, default=0)
    if nodes and kept.depth:
        own.draft.add(kept.depth, kept.seconds.get("draft", 0.0))
        verify = own.verify if nodes == kept.depth else own.branched
        verify.add(nodes, kept.seconds.get("verify", 0.0) + kept.seconds.get("host", 0.0))
