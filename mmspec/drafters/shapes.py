"""Draft shapes: chain, static tree, and the shape selected by the options `tree` and `length`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    GrownDraft,
    Layout,
    LayoutSeries,
    chain_layout,
    draw_next_token,
    empty_growth,
    step_indices,
)
from mmspec.drafters.lengths.goodput import parse
from mmspec.drafters.lengths.length import Fixed, Length, max_useful_length, useful_lengths
from mmspec.drafters.named import make_named
from mmspec.drafters.trees.draws import (
    draw,
    draw_fresh_noise,
    draw_level,
    draw_noise,
    race_level,
)
from mmspec.recipe import LINEAR, TREE
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree, limit_depth, limit_width


class Shape(ABC):
    """How deep and how wide a draft grows; an adaptive one keeps a `shape_state`."""

    kinds: tuple[Kind, ...]
    walk: ClassVar[str]  # verification execution

    @property
    @abstractmethod
    def description(self) -> str:
        """Draft execution, for display."""

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """Tokens of the longest path it may draft."""

    @property
    def fixed_reads(self) -> int | None:
        """Nodes that the draft model reads where all rounds draft `max_depth` levels alike.

        None where rounds differ.
        """
        return None

    def limit_depth(self, reach: int) -> Shape:
        """Adapt to a draft model that predicts at most so many tokens; explicit sizes stay."""
        return self

    def check(self, model: DraftModel) -> None:
        """Raises ValueError for a draft model that does not support this shape."""
        return

    def begin(self) -> Any:
        return None

    @abstractmethod
    def grow(
        self, model: DraftModel, context: Context, state: Any, shape_state: Any, kind: Kind
    ) -> GrownDraft: ...

    def observe(self, shape_state: Any, update: DraftUpdate) -> Any:
        """Return the shape state after a round."""
        return shape_state


@dataclass(frozen=True)
class Chain(Shape):
    """One proposal after the other; `length` decides before each draw whether to continue."""

    length: Length
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.IID, Kind.WOR, Kind.DET, Kind.HUB)
    walk: ClassVar[str] = LINEAR

    @property
    def description(self) -> str:
        if isinstance(self.length, Fixed):
            return f"chain of {self.length.max_length}"
        condition = type(self.length).__name__.lower()
        return f"chain of at most {self.length.max_length}, while {condition} holds"

    @property
    def max_depth(self) -> int:
        return self.length.max_length

    @property
    def fixed_reads(self) -> int | None:
        return max(self.max_depth - 1, 0) if isinstance(self.length, Fixed) else None

    def begin(self) -> Any:
        return self.length.begin()

    def grow(
        self, model: DraftModel, context: Context, state: Any, shape_state: Any, kind: Kind
    ) -> GrownDraft:
        budget = self.length.budget(shape_state, context)
        if budget == 0:
            return empty_growth(context)
        distribution = model.predict_first(context, state)
        tokens: list[Tensor] = []
        distributions: list[Categorical] = []
        alive: list[Tensor] = []
        ends = useful_lengths(context, budget)
        is_fixed = isinstance(self.length, Fixed)  # others may stop early: noise as it is needed
        race = draw_noise(distribution, kind, context, budget) if is_fixed else None
        for step in range(budget):
            draft_mask = self.length.draft_mask(shape_state, distribution)
            if ends is not None:
                draft_mask = ends > step if draft_mask is None else draft_mask & (ends > step)
            if draft_mask is not None:
                alive.append(draft_mask & alive[-1] if alive else draft_mask)
                if not bool(alive[-1].any()):
                    alive.pop()
                    break
            distributions.append(distribution)
            if race is None:
                tokens.append(draw_next_token(distribution, kind, context, step))
            else:
                tokens.append(race_level(distribution, 1, race, step))
            if step + 1 < budget:
                layout = chain_layout(step, tokens[-1].device)
                distribution = model.predict(
                    context, state, DraftNodes(tokens[-1], layout, tuple(tokens[:-1]))
                )
        if not tokens:
            return empty_growth(context, distributions)
        mask = torch.stack(alive, 1) if alive else None
        distribution_of_nodes = Categorical.cat(distributions) if kind in SAMPLED_KINDS else None
        draft = Draft.chain(torch.cat(tokens, 1), kind, distribution_of_nodes, mask)
        read = min(len(tokens), budget - 1)
        return GrownDraft(draft, [[*range(read)] + [-1] * (len(tokens) - read)], distributions)

    def observe(self, shape_state: Any, update: DraftUpdate) -> Any:
        return self.length.observe(shape_state, update.round)


@dataclass(frozen=True)
class StaticTree(Shape):
    """A fixed topology, drawn level by level; every inner node is read once."""

    tree: Tree
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.WOR, Kind.DET, Kind.IID, Kind.HUB)
    walk: ClassVar[str] = TREE

    @property
    def description(self) -> str:
        return f"static tree of {self.tree.nodes} nodes"

    @property
    def max_depth(self) -> int:
        return self.tree.depth

    @property
    def fixed_reads(self) -> int:
        return max(_places(self.tree), default=-1) + 1

    def grow(
        self, model: DraftModel, context: Context, state: Any, shape_state: Any, kind: Kind
    ) -> GrownDraft:
        tree = limit_width(limit_depth(self.tree, max_useful_length(context)), context.vocabulary)
        if not tree.nodes:
            return empty_growth(context)
        plan, draws = _plan(tree), list[Tensor]()
        distribution = model.predict_first(context, state)
        distributions = [distribution]
        race = draw_noise(distribution, kind, context, len(plan))
        reads = [level.read for level in plan]
        width = max(level.width for level in plan)
        fresh = draw_fresh_noise(distribution, kind, context, sum(reads), width)
        own_noise = None if fresh is None else fresh.split(reads, 1)
        read: tuple[Tensor, ...] = ()
        for depth, level in enumerate(plan):
            if race is not None:
                sampled = race_level(distribution, level.width, race, depth)
            elif own_noise is not None:
                sampled = draw_level(distribution, level.width, kind, own_noise[depth])
            else:
                index = step_indices(context.device)[level.first : level.first + level.read]
                sampled = draw(distribution, level.width, kind, context.noise, index[None], index)
                sampled = sampled.flatten(1)
            there = level.indices_on(context.device)
            draws.append(sampled)
            if level.inner:
                own = draws[-1] if there.inner is None else draws[-1][:, there.inner]
                nodes = DraftNodes(own, there.layout, read)
                distribution = model.predict(context, state, nodes)
                distributions.append(distribution)
                read += (nodes.tokens,)
        tokens, order = torch.cat(draws, 1), _draw_order(tree, context.device)
        tokens = tokens if order is None else tokens[:, order]
        distribution_of_nodes = None
        if kind in SAMPLED_KINDS:
            distribution_of_nodes = Categorical.cat(distributions).repeat_rows(_parent_rows(tree))
        return GrownDraft(
            Draft.from_tree(tree, tokens, kind, distribution_of_nodes),
            [_places(tree)],
            distributions,
        )


SAMPLED_KINDS = (Kind.IID, Kind.WOR, Kind.HUB)


@dataclass(frozen=True)
class _TreeLevel:
    """What is drawn and read at one level of a static tree."""

    first: int  # reading-order index of the first distribution of this level, root = 0
    read: int  # number of distributions
    width: int  # children drawn per distribution
    nodes: list[int]  # draft nodes filled here
    slots: list[int]  # their indices among the (distributions x width) drawn tokens
    inner: list[int]  # slots of those that are read, because they have children
    depth: int
    visible: Tensor  # (1, inner, read before + inner) bool
    tree: Tree
    by_device: dict[torch.device, _LevelIndices] = field(default_factory=dict)

    def indices_on(self, device: torch.device) -> _LevelIndices:
        if device not in self.by_device:
            depths = torch.full((1, len(self.inner)), self.depth, device=device)
            visible, series = self.visible.to(device), _series(self.tree, device)
            layout = Layout(depths, visible, series=series, part=self.depth)
            whole = self.inner == [*range(self.read * self.width)]
            inner = None if whole else torch.tensor(self.inner, dtype=torch.int64, device=device)
            self.by_device[device] = _LevelIndices(inner, layout)
        return self.by_device[device]


@dataclass(frozen=True)
class _LevelIndices:
    """The indices of a level, on a device."""

    inner: Tensor | None  # None = all that are drawn
    layout: Layout  # of what is read


@lru_cache(maxsize=64)
def _plan(tree: Tree) -> tuple[_TreeLevel, ...]:
    """Lay out a static tree: `places` counts inner nodes level by level."""
    places = _places(tree)
    ancestors = tree.ancestors_on(torch.device("cpu"))[0]
    reading = sorted((place, node) for node, place in enumerate(places) if place >= 0)
    read_nodes = [node for _, node in reading]
    levels = []
    parents, first, num_read = [-1], 0, 0
    for depth, nodes in enumerate(tree.levels):
        width = max(len(tree.children[parent + 1]) for parent in parents)
        slots = [
            parents.index(tree.parents[node]) * width
            + tree.children[tree.parents[node] + 1].index(node)
            for node in nodes
        ]
        inner = [node for node in nodes if tree.children[node + 1]]
        visible = ancestors[inner][:, read_nodes[: num_read + len(inner)]][None]
        read_slots = [slots[nodes.index(node)] for node in inner]
        levels.append(
            _TreeLevel(
                first, len(parents), width, list(nodes), slots, read_slots, depth, visible, tree
            )
        )
        first += len(parents)
        parents, num_read = inner, num_read + len(inner)
    return tuple(levels)


@lru_cache(maxsize=64)
def _series(tree: Tree, device: torch.device) -> LayoutSeries | None:
    """The layouts of all levels that are read, if there are several."""
    read = [[node for node in level if tree.children[node + 1]] for level in tree.levels]
    counts = tuple(len(level) for level in read if level)
    nodes = [node for level in read for node in level]
    depths = torch.tensor([tree.depths[node] for node in nodes], device=device)[None]
    visible = tree.ancestors_on(device)[:, nodes][:, :, nodes]
    return LayoutSeries(depths, visible, counts) if len(counts) > 1 else None


@lru_cache(maxsize=64)
def _draw_order(tree: Tree, device: torch.device) -> Tensor | None:  # (N,)
    """Which of all drawn tokens, level by level, each node is; None = they are in order."""
    order, start = [0] * tree.nodes, 0
    for level in _plan(tree):
        for node, slot in zip(level.nodes, level.slots, strict=True):
            order[node] = start + slot
        start += level.read * level.width
    return None if order == [*range(start)] else torch.tensor(order, device=device)


@lru_cache(maxsize=64)
def _places(tree: Tree) -> tuple[int, ...]:
    """NodeInputs order of inner nodes, level by level; -1 for leaves."""
    places, count = [-1] * tree.nodes, 0
    for level in tree.levels:
        for node in level:
            if tree.children[node + 1]:
                places[node] = count
                count += 1
    return tuple(places)


@lru_cache(maxsize=64)
def _parent_rows(tree: Tree) -> tuple[int, ...]:  # (N,)
    """The distribution that each node was drawn from, in reading order; 0 = after the context."""
    places = _places(tree)
    return tuple(0 if parent < 0 else 1 + places[parent] for parent in tree.parents)


_NAMED = {  # module and class of each named shape, imported on use
    "auto": "auto_tree.AutoTree",
    "dynamic": "dynamic_tree.DynamicTree",
    "dyspec": "dyspec.DySpec",
    "best-first": "best_first.BestFirstTree",
    "c2t": "c2t.C2T",
    "entropy": "entropy_tree.EntropyTree",
    "parallel": "parallel_tree.ParallelTree",
    "propd": "propd.ProPD",
    "stochastic-beam": "stochastic_beam.StochasticBeam",
}


def shape_of(default: Any, tree: Any, length: Any) -> Any:
    """Return the shape for `tree=` (a topology), `length=` (a draft length), or the default.

    Names take parameters: "dynamic:depth=6,nodes=40".
    """
    if tree is not None and length is not None:
        raise ValueError("tree= and length= both set the draft size; give one of them")
    if length is not None:
        return Chain(parse(length))
    if tree is None:
        return default
    if isinstance(tree, Tree):
        return StaticTree(tree)
    if isinstance(tree, Shape):
        return tree
    if (made := make_named(tree, _NAMED, "mmspec.drafters.trees")) is not None:
        return made
    if isinstance(tree, list | tuple) and tree:
        return StaticTree(Tree.branching(tree))
    raise ValueError(
        f"tree={tree!r} is not a topology; give branching widths such as [3, 2, 1], a Tree, a "
        f"mmspec.drafters.shapes.Shape, or one of {', '.join(map(repr, _NAMED))}"
    )
