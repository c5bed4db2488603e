"""Growing a draft out of an autoregressive draft model: chains and static trees.

A *draft model* answers with distributions: `predict_first` reads the committed tokens it has not read yet,
`predict` reads draft nodes behind them. What it read of a kept path it may keep; `shape` decides which
nodes it reads at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.declared import declared
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.sampling import Prefix
from mmspec.draft import Draft, Kind, Round, Scores
from mmspec.drafters.lengths.length import Fixed, Length, useful
from mmspec.drafters.trees.draws import draw
from mmspec.recipe import LINEAR, TREE
from mmspec.targets.memory import TokenBlock
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree, narrowed, trimmed


class DraftModel(ABC):
    """An autoregressive source of draft distributions."""

    @property
    @abstractmethod
    def sees(self) -> str:
        """What it sees of the picture."""

    @declared
    def wants(self) -> frozenset[str]:
        """What the target shall offer, as for a `Drafter`."""
        return frozenset()

    @declared
    def reads(self) -> bool:
        """Whether it reads the prompt's tokens by itself, as for a `Drafter`."""
        return False

    @declared
    def reach(self) -> int | None:
        """How many tokens behind the committed ones it can speak of; None = any number."""
        return None

    @declared
    def parallel(self) -> bool:
        """Whether nodes of one depth share their distribution, whatever stands before them."""
        return False

    def begin(self, context: Context) -> Any:
        """What is remembered of a request."""
        return None

    @abstractmethod
    def predict_first(
        self, context: Context, state: Any
    ) -> Categorical: ...  # distribution (B, 1) behind the context
    @abstractmethod
    def predict(self, context: Context, state: Any, nodes: Nodes) -> Categorical: ...  # (B, n)

    def keep(self, context: Context, state: Any, news: News) -> Any:
        """What is remembered after a round."""
        return state

    def holds(self, state: Any) -> int | None:
        return None  # bytes of keys and values in it, as for a `Drafter`


@dataclass(frozen=True)
class Layout:
    """Where n nodes stand behind the nodes read before them; fixed for chains and static trees."""

    depths: Tensor  # (1 or B, n), 0 = hangs from the context
    visible: Tensor  # (1 or B, n, behind + n) bool: which read nodes each one sees, itself included
    corners: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def behind(self, waiting: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Depths and additive corner behind `waiting` tokens that are not kept; made once."""
        key = (waiting, dtype)
        if key not in self.corners:
            before = self.visible.new_ones(*self.visible.shape[:2], waiting)
            visible = torch.cat((before, self.visible), 2)
            zero = torch.zeros((), dtype=dtype, device=visible.device)
            corner = torch.where(visible, zero, torch.finfo(dtype).min)
            self.corners[key] = (self.depths + waiting, corner)
        return self.corners[key]

    @cached_property
    def parents(self) -> Tensor:  # (1 or B, n)
        """Whom each node hangs from, counted in reading order from 1; 0 = the context.

        Nodes are read level by level, so the last node that one sees before itself is its parent.
        """
        count, total = self.visible.shape[1:]
        column = torch.arange(total, device=self.visible.device)
        before = column < torch.arange(total - count, total, device=column.device)[:, None]
        return ((self.visible & before) * (column + 1)).amax(-1)


@dataclass(frozen=True)
class Nodes:
    """Draft nodes to read in one forward, behind the nodes read earlier in this round."""

    tokens: Tensor  # (B, n) int64
    layout: Layout
    earlier: tuple[Tensor, ...] = ()  # (B, m) each: tokens of the nodes read before, in order

    def prefix(self, context: Context) -> Prefix | None:
        """The tokens up to and including each node, for processors that look at them."""
        if not context.sampling.needs_prefix:
            return None
        spoken = torch.cat((*self.earlier, self.tokens), 1)
        visible = self.layout.visible.expand(context.batch, -1, -1)
        return lambda row, node: torch.cat((context.prefix(row), spoken[row, visible[row, node]]))

    def block(self, like: Tensor, waiting: int = 0) -> TokenBlock:
        """As a block behind what is kept, and behind `waiting` tokens read but not kept."""
        depths, corner = self.layout.behind(waiting, like.dtype)
        count = self.tokens.shape[1]
        return TokenBlock(self.tokens, depths, corner, 0, None, corner.shape[2] - count)


@dataclass(frozen=True)
class News:
    """What became of a draft, for the draft model; `read[b]` are its own nodes on the kept path."""

    draft: Draft
    scores: Scores
    kept: Round
    read: tuple[tuple[int, ...], ...]  # indices in reading order
    nodes_read: int  # how many nodes it read this round
    distributions: Sequence[Categorical]  # the distributions it gave this round, in reading order


@dataclass
class Sprout:
    """A grown draft and, per draft node, its place in reading order (-1 = never read)."""

    draft: Draft
    places: Sequence[Sequence[int]]  # one row for all, or one per batch row
    distributions: list[Categorical]


class Shape(ABC):
    """How far and how wide a draft is grown; one that learns remembers `own`."""

    kinds: tuple[Kind, ...]
    walk: ClassVar[str]  # verification execution

    @property
    @abstractmethod
    def words(self) -> str:
        """Draft execution."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest path it may ask for."""

    def within(self, reach: int) -> Shape:
        """For a draft model that speaks of so many tokens; sizes that were asked for stay."""
        return self

    def check(self, model: DraftModel) -> None:
        """Raises ValueError for a draft model that it cannot be grown out of."""
        return

    def begin(self) -> Any:
        return None

    @abstractmethod
    def grow(
        self, model: DraftModel, context: Context, state: Any, own: Any, kind: Kind
    ) -> Sprout: ...

    def observe(self, own: Any, news: News) -> Any:
        """What is remembered after a round."""
        return own


@dataclass(frozen=True)
class Chain(Shape):
    """One proposal after the other; `length` decides, before each draw, whether to go on."""

    length: Length
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.IID, Kind.WOR, Kind.DET, Kind.HUB)
    walk: ClassVar[str] = LINEAR

    @property
    def words(self) -> str:
        if isinstance(self.length, Fixed):
            return f"chain of {self.length.most}"
        condition = type(self.length).__name__.lower()
        return f"chain of at most {self.length.most}, while {condition} holds"

    @property
    def longest(self) -> int:
        return self.length.most

    def begin(self) -> Any:
        return self.length.begin()

    def grow(self, model: DraftModel, context: Context, state: Any, own: Any, kind: Kind) -> Sprout:
        budget = self.length.budget(own, context)
        if budget == 0:
            return nothing(context)
        distribution = model.predict_first(context, state)
        tokens: list[Tensor] = []
        distributions: list[Categorical] = []
        alive: list[Tensor] = []
        for step in range(budget):
            more = self.length.more(own, distribution)
            if more is not None:
                alive.append(more & alive[-1] if alive else more)
                if not bool(alive[-1].any()):
                    alive.pop()
                    break
            distributions.append(distribution)
            tokens.append(next_token(distribution, kind, context, step))
            if step + 1 < budget:
                layout = link(step, tokens[-1].device)
                distribution = model.predict(
                    context, state, Nodes(tokens[-1], layout, tuple(tokens[:-1]))
                )
        if not tokens:
            return nothing(context, distributions)
        mask = torch.stack(alive, 1) if alive else None
        distribution_of_nodes = Categorical.cat(distributions) if kind in LAWFUL else None
        draft = Draft.chain(torch.cat(tokens, 1), kind, distribution_of_nodes, mask)
        read = min(len(tokens), budget - 1)
        return Sprout(draft, [[*range(read)] + [-1] * (len(tokens) - read)], distributions)

    def observe(self, own: Any, news: News) -> Any:
        return self.length.observe(own, news.kept)


@dataclass(frozen=True)
class StaticTree(Shape):
    """A fixed topology, filled level by level; every inner node is read once."""

    tree: Tree
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.WOR, Kind.DET, Kind.IID, Kind.HUB)
    walk: ClassVar[str] = TREE

    @property
    def words(self) -> str:
        return f"static tree of {self.tree.nodes} nodes"

    @property
    def longest(self) -> int:
        return self.tree.depth

    def grow(self, model: DraftModel, context: Context, state: Any, own: Any, kind: Kind) -> Sprout:
        tree = narrowed(trimmed(self.tree, useful(context)), context.vocabulary)
        if not tree.nodes:
            return nothing(context)
        plan = _plan(tree)
        position = context.position()
        tokens = torch.zeros(context.batch, tree.nodes, dtype=torch.int64, device=context.device)
        distribution = model.predict_first(context, state)
        distributions = [distribution]
        read: tuple[Tensor, ...] = ()
        for depth, level in enumerate(plan):
            index = _steps(context.device)[level.first : level.first + distribution.batch[1]]
            drawn = draw(distribution, level.width, kind, context.noise, position + depth, index)
            there = level.on(context.device)
            tokens.index_copy_(1, there.nodes, drawn.flatten(1)[:, there.slots])
            if level.inner:
                nodes = Nodes(tokens[:, there.inner], there.layout, read)
                distribution = model.predict(context, state, nodes)
                distributions.append(distribution)
                read += (nodes.tokens,)
        distribution_of_nodes = None
        if kind in LAWFUL:
            distribution_of_nodes = Categorical.cat(distributions)[
                :, _parent_rows(tree, context.device)
            ]
        return Sprout(
            Draft.of(tree, tokens, kind, distribution_of_nodes), [_places(tree)], distributions
        )


LAWFUL = (Kind.IID, Kind.WOR, Kind.HUB)


@dataclass(frozen=True)
class _TreeLevel:
    """What one level of a static tree draws and reads."""

    first: int  # reading-order index of the first distribution of this level, root = 0
    width: int  # children drawn per distribution
    nodes: list[int]  # draft nodes filled here
    slots: list[int]  # where they stand among the (distributions x width) drawn tokens
    inner: list[int]  # those of them that are read, because they have children
    depth: int
    visible: Tensor  # (1, inner, behind + inner) bool
    made: dict[torch.device, _There] = field(default_factory=dict)

    def on(self, device: torch.device) -> _There:
        if device not in self.made:
            depths = torch.full((1, len(self.inner)), self.depth, device=device)
            index = (self.nodes, self.slots, self.inner)
            nodes, slots, inner = (torch.tensor(i, dtype=torch.int64, device=device) for i in index)
            layout = Layout(depths, self.visible.to(device))
            self.made[device] = _There(nodes, slots, inner, layout)
        return self.made[device]


@dataclass(frozen=True)
class _There:
    """A level's indices on a device."""

    nodes: Tensor
    slots: Tensor
    inner: Tensor
    layout: Layout  # of what is read


@lru_cache(maxsize=64)
def _plan(tree: Tree) -> tuple[_TreeLevel, ...]:
    """Lay out a static tree: `places` counts inner nodes level by level."""
    places = _places(tree)
    ancestors = tree.ancestors_on(torch.device("cpu"))[0]
    reading = sorted((place, node) for node, place in enumerate(places) if place >= 0)
    readers = [node for _, node in reading]
    levels = []
    parents, first, behind = [-1], 0, 0
    for depth, nodes in enumerate(tree.levels):
        width = max(len(tree.kids[parent + 1]) for parent in parents)
        slots = [
            parents.index(tree.parents[node]) * width
            + tree.kids[tree.parents[node] + 1].index(node)
            for node in nodes
        ]
        inner = [node for node in nodes if tree.kids[node + 1]]
        visible = ancestors[inner][:, readers[: behind + len(inner)]][None]
        levels.append(_TreeLevel(first, width, list(nodes), slots, inner, depth, visible))
        first += len(parents)
        parents, behind = inner, behind + len(inner)
    return tuple(levels)


@lru_cache(maxsize=64)
def _places(tree: Tree) -> tuple[int, ...]:
    """Reading order of inner nodes, level by level; -1 for leaves."""
    places, count = [-1] * tree.nodes, 0
    for level in tree.levels:
        for node in level:
            if tree.kids[node + 1]:
                places[node] = count
                count += 1
    return tuple(places)


@lru_cache(maxsize=64)
def _parent_rows(tree: Tree, device: torch.device) -> Tensor:  # (N,)
    """The distribution that each node was drawn from, in reading order; 0 = behind the context."""
    places = _places(tree)
    rows = [0 if parent < 0 else 1 + places[parent] for parent in tree.parents]
    return torch.tensor(rows, device=device)


def nothing(context: Context, distributions: Sequence[Categorical] = ()) -> Sprout:
    return Sprout(Draft.empty(context.batch, context.device), [()], list(distributions))


def next_token(
    distribution: Categorical, kind: Kind, context: Context, step: int
) -> Tensor:  # (B, 1)
    """The next token of a chain."""
    if distribution.hard:
        return distribution.scores.argmax(-1)
    index = _steps(distribution.scores.device)[step : step + 1]
    return draw(distribution, 1, kind, context.noise, context.position() + step, index)[:, :, 0]


@lru_cache(maxsize=256)
def link(step: int, device: torch.device) -> Layout:
    """One node behind `step` others of a chain."""
    depths = torch.full((1, 1), step, device=device)
    return Layout(depths, torch.ones(1, 1, step + 1, dtype=torch.bool, device=device))


@lru_cache(maxsize=8)
def _steps(device: torch.device) -> Tensor:
    return torch.arange(1024, device=device)


def read_path(places: Sequence[Sequence[int]], kept: Round) -> tuple[tuple[int, ...], ...]:
    """Per row, the kept nodes that the draft model has read, in reading order.

    A row without places was drafted by somebody else.
    """
    rows = []
    for row, path in enumerate(kept.path):
        own = places[row] if len(places) > 1 else places[0]
        read = [own[node] for node in path] if own else []
        rows.append(tuple(place for place in read if place >= 0))
    return tuple(rows)
