"""The tree with the highest throughput on this machine, learned while decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind, Round
from mmspec.drafters.draft_model import DraftModel, DraftUpdate, GrownDraft
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain, Shape, StaticTree
from mmspec.drafters.trees.draws import draw
from mmspec.drafters.trees.tree_budget import TreeBudget
from mmspec.recipe import TREE
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree

_WARMUP_DEPTHS = (3, 3, 1, 1, 6, 6)  # lengths of the first chains, to time several sizes
_PERIOD = 128  # rounds between choices of the tree; the first come after 16, 32 and 64
_DECAY = 0.98
_PRIOR = (0.6, 0.15, 0.06, 0.03)  # prior probability of each rank
_PRIOR_COUNT = 2.0  # looks that the prior counts for
_LEVEL_PRIOR_COUNT = 8.0  # looks at a level that those at all levels count for
_PROBE_PERIOD = 32  # in one round of so many a chain half as long is timed
_GROWTH_LIMIT = 1.5  # largest tree, relative to the sizes timed
_ROUNDS = 128  # timings kept per part of a round


class LinearTimings:
    """Seconds of the last rounds, as a linear function of their size.

    Only the last rounds count, so that the slow first ones of a process drop out. With `from_zero`
    the line passes through the origin, as for drafting, level by level.
    """

    def __init__(self, from_zero: bool = False, rounds: Iterable[tuple[int, float]] = ()) -> None:
        self.from_zero, self.rounds = from_zero, list(rounds)[-_ROUNDS:]

    def add(self, size: int, seconds: float) -> None:
        self.rounds = [*self.rounds[1 - _ROUNDS :], (size, seconds)]

    def copy(self) -> LinearTimings:
        return LinearTimings(self.from_zero, self.rounds)

    def __len__(self) -> int:
        return len(self.rounds)

    @property
    def largest(self) -> int:
        """The largest size timed recently; 1 without timings."""
        return max((size for size, _ in self.rounds), default=1)

    def line(self) -> tuple[float, float]:
        """Seconds at size 0 and per further unit of size; neither is below 0.

        Least squares over the median of every size, weighted by its number of timings.
        """
        if self.from_zero:
            return 0.0, median(seconds / size for size, seconds in self.rounds)
        sizes = [size for size, _ in self.rounds]
        typical = {
            one: median(seconds for size, seconds in self.rounds if size == one)
            for one in set(sizes)
        }
        costs = [typical[size] for size in sizes]
        middle, mean = fmean(sizes), fmean(costs)
        spread = sum((size - middle) ** 2 for size in sizes)
        pairs = zip(sizes, costs, strict=True)
        leaning = sum((size - middle) * (cost - mean) for size, cost in pairs)
        slope = min(max(leaning / spread, 0.0), mean / middle) if spread else 0.0
        return mean - slope * middle, slope


@dataclass
class TreeStatistics:
    """The statistics of `AutoTree`: acceptance by rank of the candidate, and cost by size."""

    ranks: list[float]  # counts of the next token being the drafter's best, second, ...
    num_observed: float = 0.0
    draft: LinearTimings = field(default_factory=partial(LinearTimings, True))  # by levels
    verify: LinearTimings = field(default_factory=LinearTimings)  # of chains, by nodes
    tree_verify: LinearTimings = field(
        default_factory=LinearTimings
    )  # of trees, whose paths are moved in the cache
    levels: list[tuple[float, float]] = field(
        default_factory=list
    )  # best token right, and observations
    tree: Tree = field(default_factory=lambda: Tree.chain(_WARMUP_DEPTHS[0]))
    batch: int = 0
    rounds: int = 0
    best: Tensor | None = None  # (B, n, K) the drafter's best tokens at each node read

    def copy(self) -> TreeStatistics:
        copied = replace(self, ranks=list(self.ranks), levels=list(self.levels), best=None)
        copied.draft, copied.verify = self.draft.copy(), self.verify.copy()
        copied.tree_verify = self.tree_verify.copy()
        return copied

    def rates(self) -> tuple[float, ...]:
        """P(child j is right), by rank; the same at all nodes."""
        whole = self.num_observed + _PRIOR_COUNT
        pairs = zip(self.ranks, _PRIOR, strict=False)
        return tuple((observed + _PRIOR_COUNT * prior) / whole for observed, prior in pairs)

    def chains(self, max_depth: int) -> list[float]:
        """Expected tokens of a round with a chain of 0, 1, ... drafted tokens.

        Drafters err more often further ahead, so the best token's probability is that of its level.
        """
        found, expected, everywhere = [1.0], 1.0, self.rates()[0]
        for level in range(max_depth):
            right, num_observed = self.levels[level] if level < len(self.levels) else (0.0, 0.0)
            expected *= (right + _LEVEL_PRIOR_COUNT * everywhere) / (
                num_observed + _LEVEL_PRIOR_COUNT
            )
            found.append(found[-1] + expected)
        return found

    def record_rank(self, level: int, rank: int | None) -> None:
        """Record which rank of the drafter was right at a level; None = none of the known ones."""
        self.ranks = [_DECAY * count for count in self.ranks]
        self.num_observed = _DECAY * self.num_observed + 1
        if rank is not None:
            self.ranks[rank] += 1
        self.levels += [(0.0, 0.0)] * (level + 1 - len(self.levels))
        right, num_observed = self.levels[level]
        self.levels[level] = (_DECAY * right + (rank == 0), _DECAY * num_observed + 1)


@dataclass(eq=False)
class AutoTree(Shape):
    """The tree with the most expected tokens per second, from measured acceptance and cost.

    Every token of the target is looked up among the `width` best candidates of the drafter, whether
    or not they were proposed, so chains also measure the value of a second child. Sequoia's dynamic
    programme (`TreeBudget`) gives the best tree of every size, and the timings decide the size: on
    a CPU, where every node costs, mostly a chain. Chains of all lengths are among the candidates
    and are grown as chains. Updated after 6, 16, 32, 64 and every 128 rounds; `statistics` persist
    across requests. Raises ValueError for sizes below 1.
    """

    nodes: int = 32
    depth: int = 16
    width: int = 4
    statistics: TreeStatistics = field(init=False, repr=False)
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    walk: ClassVar[str] = TREE

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth) < 1 or not 1 <= self.width <= len(_PRIOR):
            raise ValueError(
                f"nodes={self.nodes}, depth={self.depth}, width={self.width}: give 1 or more "
                f"nodes and levels, and a width within 1..{len(_PRIOR)}"
            )
        self.statistics = TreeStatistics([0.0] * self.width)

    @property
    def description(self) -> str:
        return f"tree of at most {self.nodes} nodes, adaptive"

    @property
    def max_depth(self) -> int:
        return self.depth

    def limit_depth(self, reach: int) -> AutoTree:
        return replace(self, depth=min(self.depth, reach))

    def begin(self) -> TreeStatistics:
        return self.statistics.copy()

    def grow(
        self,
        model: DraftModel,
        context: Context,
        state: Any,
        statistics: TreeStatistics,
        kind: Kind,
    ) -> GrownDraft:
        tree = statistics.tree
        if statistics.rounds % _PROBE_PERIOD == _PROBE_PERIOD - 1 and statistics.rounds > len(
            _WARMUP_DEPTHS
        ):
            tree = Tree.chain(max(1, tree.depth // 2))
        shape = Chain(Fixed(tree.nodes)) if tree.is_chain else StaticTree(tree)
        sprout = shape.grow(model, context, state, None, kind)
        is_known = tree.is_chain and all(
            distribution.hard for distribution in sprout.distributions
        )  # by where it broke off
        statistics.best = None if is_known else _rank_candidates(sprout, self.width, kind, context)
        return sprout

    def observe(self, statistics: TreeStatistics, update: DraftUpdate) -> TreeStatistics:
        _record_times(statistics, update.round)
        if statistics.best is not None:
            observed = _observed_ranks(statistics.best.tolist(), update)
        else:
            observed = _observed_chain_ranks(update, self.width)
        for level, rank in observed:
            statistics.record_rank(level, rank)
        statistics.rounds += 1
        if statistics.rounds < len(_WARMUP_DEPTHS):
            statistics.tree = Tree.chain(min(_WARMUP_DEPTHS[statistics.rounds], self.depth))
        elif statistics.verify and (
            statistics.rounds % _PERIOD == 0
            or statistics.rounds in (len(_WARMUP_DEPTHS), 16, 32, 64)
        ):
            statistics.tree = self.choose(statistics)
        self.statistics = statistics
        return statistics

    def choose(self, statistics: TreeStatistics) -> Tree:
        """The best tree for the current statistics, at most 1.5 times the sizes timed."""
        largest = max(statistics.verify.largest, statistics.tree_verify.largest)
        max_nodes = min(self.nodes, int(_GROWTH_LIMIT * largest) + 1)
        max_depth = min(self.depth, int(_GROWTH_LIMIT * statistics.draft.largest) + 1)
        budget = TreeBudget(statistics.rates(), max_nodes, max_depth)
        tokens, chains = budget.tokens(), statistics.chains(max_depth)
        (_, level), (round_, node) = statistics.draft.line(), statistics.verify.line()
        tree_verify, node_in_tree = (
            statistics.tree_verify.line() if statistics.tree_verify else (round_, node)
        )
        speeds: dict[tuple[int, int], float] = {}
        for depth in range(1, max_depth + 1):
            speeds[depth, depth] = chains[depth] / (level * depth + round_ + node * depth)
            share = (
                chains[depth] / tokens[depth, min(depth, max_nodes)]
            )  # of what alike levels promise
            for nodes in range(depth + 1, max_nodes + 1):
                seconds = level * depth + tree_verify + max(node_in_tree, node) * nodes
                speeds[depth, nodes] = min(1.0, share) * tokens[depth, nodes] / seconds
        depth, nodes = max(speeds, key=speeds.__getitem__)
        return Tree.chain(depth) if nodes == depth else budget.tree(nodes, depth)


def _rank_candidates(sprout: GrownDraft, width: int, kind: Kind, context: Context) -> Tensor | None:
    """The drafter's best tokens at every node it read, (B, n, K)."""
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


def _observed_ranks(
    best: Sequence[Sequence[Sequence[int]]], update: DraftUpdate
) -> Iterator[tuple[int, int | None]]:
    """Level and rank of every token of the target that follows a node the drafter has read.

    After the end of a text no candidate is right.
    """
    for row, tokens in enumerate(update.round.tokens):
        places = [0, *(place + 1 for place in update.read[row])]
        for level, (place, token) in enumerate(zip(places, tokens, strict=False)):
            found = best[row][place]
            yield level, found.index(token) if token in found else None
        if 0 < len(tokens) < len(places) and update.round.finished[row]:
            yield len(tokens), None


def _observed_chain_ranks(update: DraftUpdate, width: int) -> Iterator[tuple[int, int | None]]:
    """The same for a greedy chain: only the distribution after its accepted tokens is evaluated."""
    for row, tokens in enumerate(update.round.tokens):
        accepted = len(update.round.path[row])
        yield from ((level, 0) for level in range(accepted))
        if not tokens or accepted >= len(update.distributions):
            continue
        if accepted == len(tokens):  # the text ended on a drafted token
            yield accepted, None
            continue
        scores = update.distributions[accepted].scores[row, 0]
        best = scores.topk(min(width, len(scores))).indices.tolist()
        yield accepted, best.index(tokens[accepted]) if tokens[accepted] in best else None


def _record_times(statistics: TreeStatistics, round_: Round) -> None:
    if statistics.batch != len(round_.drafted):  # timings hold for one batch size
        statistics.draft, statistics.verify = LinearTimings(True), LinearTimings()
        statistics.tree_verify = LinearTimings()
        statistics.batch = len(round_.drafted)
    nodes = max(round_.drafted, default=0)
    if nodes and round_.depth:
        statistics.draft.add(round_.depth, round_.seconds.get("draft", 0.0))
        verify = statistics.verify if nodes == round_.depth else statistics.tree_verify
        verify.add(nodes, round_.seconds.get("verify", 0.0) + round_.seconds.get("host", 0.0))
