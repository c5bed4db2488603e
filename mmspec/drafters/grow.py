"""Growing a draft out of an autoregressive draft model: chains, static trees, dynamic trees.

A *draft model* answers with laws: `listen` reads the committed tokens it has not read yet, `say` reads draft
nodes behind them. What it read of a kept path it may keep; `shape` decides which nodes it reads at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.context import Context
from mmspec.draft import Draft, Kind, Round, Scores
from mmspec.drafters.draws import draw
from mmspec.laws import Categorical
from mmspec.length import Length
from mmspec.memory import Block
from mmspec.sampling import Prefix
from mmspec.trees import Tree


class DraftModel(Protocol):
    """An autoregressive source of draft laws; `sees` says what it sees of the picture."""

    @property
    def sees(self) -> str: ...
    def begin(self, context: Context) -> Any: ...
    def listen(self, context: Context, state: Any) -> Categorical: ...  # law (B, 1) behind the context
    def say(self, context: Context, state: Any, nodes: Nodes) -> Categorical: ...  # (B, n)
    def keep(self, context: Context, state: Any, news: News) -> Any: ...


@dataclass(frozen=True)
class Nodes:
    """Draft nodes to read in one forward, behind the nodes read earlier in this round."""

    tokens: Tensor  # (B, n) int64
    depths: Tensor  # (1 or B, n), 0 = hangs from the context
    visible: Tensor  # (1 or B, n, behind + n) bool: which read nodes each one sees, itself included
    earlier: tuple[Tensor, ...] = ()  # (B, m) each: tokens of the nodes read before, in order

    @property
    def behind(self) -> int:
        return sum(tokens.shape[1] for tokens in self.earlier)

    def prefix(self, context: Context) -> Prefix | None:
        """The tokens up to and including each node, for processors that look at them."""
        if not context.sampling.needs_prefix:
            return None
        spoken = torch.cat((*self.earlier, self.tokens), 1)
        visible = self.visible.expand(context.batch, -1, -1)
        return lambda row, node: torch.cat((context.prefix(row), spoken[row, visible[row, node]]))

    def block(self, like: Tensor, waiting: int = 0) -> Block:
        """As a block behind what is kept, and behind `waiting` tokens read but not kept."""
        corner = _corner(self.visible, waiting, like.dtype)
        return Block(self.tokens, self.depths + waiting, corner, 0, None, self.behind + waiting)


@dataclass(frozen=True)
class News:
    """What became of a draft, for the draft model; `read[b]` are its own nodes on the kept path."""

    draft: Draft
    scores: Scores
    kept: Round
    read: tuple[tuple[int, ...], ...]  # indices in reading order
    nodes_read: int  # how many nodes it read this round
    laws: Sequence[Categorical]  # the laws it gave this round, in reading order


@dataclass
class Sprout:
    """A grown draft and, per draft node, its place in reading order (-1 = never read)."""

    draft: Draft
    places: Sequence[Sequence[int]]  # one row for all, or one per batch row
    laws: list[Categorical]


class Shape(Protocol):
    """How far and how wide a draft is grown."""

    kinds: tuple[Kind, ...]

    def begin(self) -> Any: ...
    def grow(self, model: DraftModel, context: Context, state: Any, own: Any, kind: Kind) -> Sprout: ...
    def observe(self, own: Any, kept: Round) -> Any: ...


@dataclass(frozen=True)
class Chain:
    """One proposal after the other; `length` decides, before each draw, whether to go on."""

    length: Length
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.IID, Kind.WOR, Kind.DET, Kind.HUB)

    def begin(self) -> Any:
        return self.length.begin()

    def grow(self, model: DraftModel, context: Context, state: Any, own: Any, kind: Kind) -> Sprout:
        budget = self.length.budget(own, context)
        if budget == 0:
            return _nothing(context)
        device = context.device
        law = model.listen(context, state)
        position = context.position()
        tokens: list[Tensor] = []
        laws: list[Categorical] = []
        alive: list[Tensor] = []
        for step in range(budget):
            more = self.length.more(own, law)
            if more is not None:
                alive.append(more & alive[-1] if alive else more)
                if not bool(alive[-1].any()):
                    alive.pop()
                    break
            laws.append(law)
            token = draw(law, 1, kind, context.noise, position + step, _steps(device)[step : step + 1])
            tokens.append(token[:, :, 0])
            if step + 1 < budget:
                depths, visible = _chain_step(step, device)
                law = model.say(context, state, Nodes(tokens[-1], depths, visible, tuple(tokens[:-1])))
        if not tokens:
            return _nothing(context, laws)
        mask = torch.stack(alive, 1) if alive else None
        law_of_nodes = Categorical.cat(laws) if kind in _LAWFUL else None
        draft = Draft.chain(torch.cat(tokens, 1), kind, law_of_nodes, mask)
        read = min(len(tokens), budget - 1)
        return Sprout(draft, [[*range(read)] + [-1] * (len(tokens) - read)], laws)

    def observe(self, own: Any, kept: Round) -> Any:
        return self.length.observe(own, kept)


@dataclass(frozen=True)
class StaticTree:
    """A fixed topology, filled level by level; every inner node is read once."""

    tree: Tree
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.WOR, Kind.DET, Kind.IID, Kind.HUB)

    def begin(self) -> Any:
        return None

    def grow(self, model: DraftModel, context: Context, state: Any, own: Any, kind: Kind) -> Sprout:
        tree = _trimmed(self.tree, _remaining(context) - 1)
        if not tree.nodes:
            return _nothing(context)
        plan = _plan(tree)
        position = context.position()
        tokens = torch.zeros(context.batch, tree.nodes, dtype=torch.int64, device=context.device)
        law = model.listen(context, state)
        laws = [law]
        read: tuple[Tensor, ...] = ()
        for depth, level in enumerate(plan):
            index = _steps(context.device)[level.first : level.first + law.batch[1]]
            drawn = draw(law, level.width, kind, context.noise, position + depth, index)
            tokens[:, level.nodes] = drawn.flatten(1)[:, level.slots]
            if level.inner:
                nodes = Nodes(
                    tokens[:, level.inner],
                    torch.full((1, len(level.inner)), depth, device=context.device),
                    level.visible.to(context.device),
                    read,
                )
                law = model.say(context, state, nodes)
                laws.append(law)
                read += (nodes.tokens,)
        law_of_nodes = None
        if kind in _LAWFUL:
            rows = [1 + plan_place for plan_place in _parent_places(tree)]
            law_of_nodes = Categorical.cat(laws)[:, rows]
        return Sprout(Draft.of(tree, tokens, kind, law_of_nodes), [_places(tree)], laws)

    def observe(self, own: Any, kept: Round) -> Any:
        return own


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: grow the likeliest `beam` paths for `depth` levels, keep the best `nodes` of all.

    Li et al. 2024, section 4. Nodes are chosen by looking at them, so proposals are DET (V3 verifiers) or,
    with the target's own noise in the ranking, RACE (coupled verifier). Every row has its own topology.
    """

    depth: int = 5
    beam: int = 8
    nodes: int = 24
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)

    def __post_init__(self) -> None:
        if min(self.depth, self.beam, self.nodes) < 1:
            raise ValueError(
                f"depth={self.depth}, beam={self.beam}, nodes={self.nodes}: all must be at least 1"
            )

    def begin(self) -> Any:
        return None

    def grow(self, model: DraftModel, context: Context, state: Any, own: Any, kind: Kind) -> Sprout:
        depth = min(self.depth, _remaining(context) - 1)
        if depth < 1:
            return _nothing(context)
        batch, device = context.batch, context.device
        law = model.listen(context, state)
        laws = [law]
        beam = min(self.beam, law.size)
        pool = _Pool(batch, device)
        ranking = _ranking(law, kind, context, 0)
        pool.add(*ranking.topk(beam, -1), parents=torch.full((batch, 1), -1, device=device))
        front = torch.arange(beam, device=device).expand(batch, -1)  # candidate index of the beam
        seen = torch.zeros(batch, beam, 0, dtype=torch.bool, device=device)
        read: tuple[Tensor, ...] = ()
        for level in range(1, depth):
            itself = torch.eye(beam, dtype=torch.bool, device=device).expand(batch, -1, -1)
            visible = torch.cat((seen, itself), 2)
            depths = torch.full((1, beam), level - 1, device=device)
            pool.read(front)
            nodes = Nodes(pool.tokens(front), depths, visible, read)
            law = model.say(context, state, nodes)
            laws.append(law)
            read += (nodes.tokens,)
            ranking = pool.scores(front)[..., None] + _ranking(law, kind, context, level)
            start = pool.size
            pool.add(*ranking.topk(beam, -1), parents=front)
            best = pool.score[:, start:].topk(beam, -1).indices  # (B, beam) among beam * beam
            seen = visible.gather(1, (best // beam)[..., None].expand(-1, -1, visible.shape[2]))
            front = start + best
        return pool.harvest(min(self.nodes, pool.size), kind, laws)

    def observe(self, own: Any, kept: Round) -> Any:
        return own


class _Pool:
    """Candidates of a dynamic tree, in the order they were scored."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.score = torch.empty(batch, 0, device=device)
        self.token = torch.empty(batch, 0, dtype=torch.int64, device=device)
        self.parent = torch.empty(batch, 0, dtype=torch.int64, device=device)
        self.place = torch.empty(batch, 0, dtype=torch.int64, device=device)
        self.reads = 0

    @property
    def size(self) -> int:
        return self.score.shape[1]

    def add(self, score: Tensor, token: Tensor, parents: Tensor) -> None:  # (B, n, k) x2, (B, n)
        width = score.shape[-1]
        self.score = torch.cat((self.score, score.flatten(1).float()), 1)
        self.token = torch.cat((self.token, token.flatten(1)), 1)
        self.parent = torch.cat((self.parent, parents.repeat_interleave(width, 1)), 1)
        unread = torch.full_like(token.flatten(1), -1)
        self.place = torch.cat((self.place, unread), 1)

    def read(self, index: Tensor) -> None:
        count = index.shape[1]
        places = torch.arange(self.reads, self.reads + count, device=index.device)
        self.place = self.place.scatter(1, index, places.expand_as(index))
        self.reads += count

    def tokens(self, index: Tensor) -> Tensor:
        return self.token.gather(1, index)

    def scores(self, index: Tensor) -> Tensor:
        return self.score.gather(1, index)

    def harvest(self, nodes: int, kind: Kind, laws: list[Categorical]) -> Sprout:
        """The best candidates; a child never scores above its parent, and ties favour the earlier one."""
        order = self.score.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
        kept = order.sort(1).values
        parents = self.parent.gather(1, kept)
        found = torch.searchsorted(kept, parents.clamp_min(0))
        parents = torch.where(parents < 0, -1, found)
        draft = Draft(
            self.token.gather(1, kept), parents, torch.ones_like(kept, dtype=torch.bool), kind
        )
        return Sprout(draft, self.place.gather(1, kept).tolist(), laws)


_LAWFUL = (Kind.IID, Kind.WOR, Kind.HUB)


@dataclass(frozen=True)
class _Level:
    """What one level of a static tree draws and reads."""

    first: int  # reading-order index of the first law of this level, root = 0
    width: int  # children drawn per law
    nodes: list[int]  # draft nodes filled here
    slots: list[int]  # where they stand among the (laws x width) drawn tokens
    inner: list[int]  # those of them that are read, because they have children
    visible: Tensor  # (1, inner, behind + inner) bool


@lru_cache(maxsize=64)
def _plan(tree: Tree) -> tuple[_Level, ...]:
    """Lay out a static tree: `places` counts inner nodes level by level."""
    places = _places(tree)
    ancestors = tree.ancestors_on(torch.device("cpu"))[0]
    reading = sorted((place, node) for node, place in enumerate(places) if place >= 0)
    readers = [node for _, node in reading]
    levels = []
    parents, first, behind = [-1], 0, 0
    for nodes in tree.levels:
        width = max(len(tree.kids[parent + 1]) for parent in parents)
        slots = [
            parents.index(tree.parents[node]) * width + tree.kids[tree.parents[node] + 1].index(node)
            for node in nodes
        ]
        inner = [node for node in nodes if tree.kids[node + 1]]
        visible = ancestors[inner][:, readers[: behind + len(inner)]][None]
        levels.append(_Level(first, width, list(nodes), slots, inner, visible))
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


def _parent_places(tree: Tree) -> list[int]:
    places = _places(tree)
    return [-1 if parent < 0 else places[parent] for parent in tree.parents]


@lru_cache(maxsize=256)
def _trimmed(tree: Tree, depth: int) -> Tree:
    """The tree without nodes deeper than `depth` tokens."""
    if tree.depth <= depth:
        return tree
    left = [node for node in range(tree.nodes) if tree.depths[node] < depth]
    index = {node: place for place, node in enumerate(left)} | {-1: -1}
    return Tree(tuple(index[tree.parents[node]] for node in left))


def _remaining(context: Context) -> int:
    """Most tokens any unfinished row may still emit."""
    return max(
        context.request.room - context.generated(row)
        for row in range(context.batch)
        if not context.finished[row]
    )


def _nothing(context: Context, laws: Sequence[Categorical] = ()) -> Sprout:
    return Sprout(Draft.empty(context.batch, context.device), [()], list(laws))


def _ranking(law: Categorical, kind: Kind, context: Context, level: int) -> Tensor:  # (B, n, V)
    """Log-probabilities that rank candidates, with the target's noise for RACE proposals."""
    if kind is Kind.RACE and not law.hard:
        keys = context.noise.shared(context.position() + level)
        return law.perturbed(keys).log_softmax(-1)
    return law.scores.log_softmax(-1)


@lru_cache(maxsize=256)
def _chain_step(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.full((1, 1), step, device=device),
        torch.ones(1, 1, step + 1, dtype=torch.bool, device=device),
    )


@lru_cache(maxsize=8)
def _steps(device: torch.device) -> Tensor:
    return torch.arange(1024, device=device)


def _corner(visible: Tensor, waiting: int, dtype: torch.dtype) -> Tensor:
    if waiting:
        before = visible.new_ones(*visible.shape[:2], waiting)
        visible = torch.cat((before, visible), 2)
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)


def read_path(places: Sequence[Sequence[int]], kept: Round) -> tuple[tuple[int, ...], ...]:
    """Per row, the kept nodes that the draft model has read, in reading order."""
    rows = []
    for row, path in enumerate(kept.path):
        own = places[row] if len(places) > 1 else places[0]
        read = [own[node] for node in path]
        rows.append(tuple(place for place in read if place >= 0))
    return tuple(rows)


