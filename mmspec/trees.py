"""Tree topologies: one shared by all rows of a batch, or one table of parents per row.

And the tokens along their paths, as logits processors read them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.errors import is_integer

MAX_NODES = 4096  # of a tree of branching widths; tables of ancestors are quadratic in it


@dataclass(frozen=True)
class Tree:
    """A forest below the context: `parents[i] < i`; -1 = child of the context."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(
                    f"parents[{node}] is {parent}, but a parent comes before its child (or is -1); "
                    "list the nodes level by level"
                )

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(length: int) -> Tree:
        """A chain: each node is the child of the one before."""
        return Tree(tuple(range(-1, length - 1)))

    @staticmethod
    def branching(widths: Sequence[int]) -> Tree:
        """A complete tree: every node of level d has `widths[d]` children."""
        listed = isinstance(widths, list | tuple)
        if not listed or not all(is_integer(one) and one > 0 for one in widths):
            raise ValueError(
                f"tree={widths!r} must be a list of branching widths of at least 1, as in [3, 2, 1]"
            )
        if sum(accumulate(widths, operator.mul)) > MAX_NODES:
            raise ValueError(
                f"tree={list(widths)} has more than {MAX_NODES} nodes; give fewer or smaller widths"
            )
        parents: list[int] = []
        level = [-1]
        for width in widths:
            first = len(parents)
            parents += [parent for parent in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return Tree(tuple(parents))

    @staticmethod
    def from_ranks(paths: Sequence[Sequence[int]]) -> Tree:
        """From paths of child ranks, as EAGLE and Medusa write them: [[0], [1], [0, 0], ...]."""
        ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        index = {(): -1} | {path: node for node, path in enumerate(ordered)}
        for path in ordered:
            if path[:-1] not in index:
                raise ValueError(
                    f"path {list(path)} has no parent {list(path[:-1])}; list every prefix"
                )
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in index:
                raise ValueError(
                    f"path {list(path)} skips a sibling; ranks start at 0 without gaps"
                )
        return Tree(tuple(index[path[:-1]] for path in ordered))

    @staticmethod
    def from_digits(paths: str) -> Tree:
        """From such paths in digits: "0 1 00 ..."."""
        return Tree.from_ranks([[int(rank) for rank in path] for path in paths.split()])

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the context, 0 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return max(self.depths, default=-1) + 1

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, self.nodes - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of the context (entry 0) and of node i (entry i + 1)."""
        table: list[list[int]] = [[] for _ in range(self.nodes + 1)]
        for node, parent in enumerate(self.parents):
            table[parent + 1].append(node)
        return tuple(tuple(row) for row in table)

    @cached_property
    def width(self) -> int:
        """Largest number of children of any node."""
        return max((len(row) for row in self.children), default=0)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of each depth."""
        return tuple(
            tuple(node for node, depth in enumerate(self.depths) if depth == level)
            for level in range(self.depth)
        )

    def parents_on(self, device: torch.device) -> Tensor:  # (1, N)
        return _parents(self, device)

    def depths_on(self, device: torch.device) -> Tensor:  # (1, N)
        return _depths(self, device)

    def scored_depths_on(self, device: torch.device) -> Tensor:  # (1, N + 1)
        """Distance from the context of what each row of `Scores` predicts."""
        return _scored_depths(self, device)

    def ancestors_on(self, device: torch.device) -> Tensor:  # (1, N, N) bool
        return _ancestors(self, device)

    def children_on(self, device: torch.device) -> Tensor:  # (1, N + 1, max(width, 1)), -1 padded
        return _children(self, device)


@lru_cache(maxsize=256)
def _parents(tree: Tree, device: torch.device) -> Tensor:
    return torch.tensor(tree.parents, dtype=torch.int64, device=device).view(1, -1)


@lru_cache(maxsize=256)
def _depths(tree: Tree, device: torch.device) -> Tensor:
    return torch.tensor(tree.depths, dtype=torch.int64, device=device).view(1, -1)


@lru_cache(maxsize=256)
def _scored_depths(tree: Tree, device: torch.device) -> Tensor:
    depths = [0, *(depth + 1 for depth in tree.depths)]
    return torch.tensor(depths, device=device).view(1, -1)


@lru_cache(maxsize=256)
def _ancestors(tree: Tree, device: torch.device) -> Tensor:
    table = torch.eye(tree.nodes, dtype=torch.bool)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            table[node] |= table[parent]
    return table[None].to(device)


@lru_cache(maxsize=256)
def _children(tree: Tree, device: torch.device) -> Tensor:
    width = max(tree.width, 1)
    rows = [list(row) + [-1] * (width - len(row)) for row in tree.children]
    return torch.tensor(rows, dtype=torch.int64, device=device)[None]


def compute_reach(
    parents: Tensor, max_depth: int | None = None
) -> Tensor:  # (B, N) -> (B, N + 1, N) float, 1 at [b, i + 1, j]: j is i or above
    """Which nodes are on the path to each node, for rows that differ; none in row 0, the context.

    `max_depth` bounds the nodes of a path; without it any tree of N nodes is expected.
    """
    count = parents.shape[1]
    nodes, itself = _identity(count, parents.device)
    reach = itself + (parents[..., None] == nodes)
    steps = (count if max_depth is None else max_depth) - 1  # from the last node to the first
    times = max(steps - 1, 0).bit_length()
    for _ in range(times):  # doubling the reach each time; binomials up to C(8, 4) stay small
        reach = torch.bmm(reach, reach)
        reach = reach.clamp_(max=1) if times > 3 else reach
    reach = reach if times > 3 or not times else reach.clamp_(max=1)
    return functional.pad(reach, (0, 0, 1, 0))


@lru_cache(maxsize=64)
def _identity(count: int, device: torch.device) -> tuple[Tensor, Tensor]:  # (N,), (N, N) float
    return torch.arange(count, device=device), torch.eye(count, device=device)


def compute_children(parents: Tensor) -> Tensor:  # (B, N) -> (B, N + 1, C) node index, -1 padded
    """Children of the context (row 0) and of each node, for rows that differ."""
    batch, count = parents.shape
    siblings = parents[..., None] == parents[:, None]
    rank = siblings.tril(-1).sum(-1)  # earlier siblings
    width = int(rank.max()) + 1 if count else 1
    nodes = torch.arange(count, device=rank.device).expand_as(rank)
    table = torch.full((batch, (count + 1) * width), -1, device=rank.device)
    table.scatter_(1, (parents + 1) * width + rank, nodes)
    return table.view(batch, count + 1, width)


def expand_rows(values: Tensor, batch: int) -> Tensor:  # (1 or B, ...) -> (B, ...)
    """The values of every row; no operation where they are given for each."""
    return values if len(values) == batch else values.expand(batch, *values.shape[1:])


@lru_cache(maxsize=64)
def row_indices(batch: int, device: torch.device) -> Tensor:  # (B,)
    """0, 1, ... of the rows of a batch."""
    return torch.arange(batch, device=device)


@lru_cache(maxsize=64)
def row_column(batch: int, device: torch.device) -> Tensor:  # (B, 1)
    """The same as a column, for indexing with one index per row and place."""
    return torch.arange(batch, device=device)[:, None]


@lru_cache(maxsize=64)
def all_true_mask(batch: int, nodes: int, device: torch.device) -> Tensor:  # (B, N) bool
    """The mask of drafts without padding."""
    return torch.ones(batch, nodes, dtype=torch.bool, device=device)


@lru_cache(maxsize=64)
def mask_values(
    batch: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:  # (B, 1, 1, 1), ()
    """What is written where a slot is seen, in the shape of B rows, and where it is not."""
    hide = torch.tensor(torch.finfo(dtype).min, dtype=dtype)
    return torch.zeros(batch, 1, 1, 1, dtype=dtype, device=device), hide.to(device)


@lru_cache(maxsize=256)
def limit_width(tree: Tree, width: int) -> Tree:
    """The tree with at most the first `width` children of any node."""
    if max(map(len, tree.children)) <= width:
        return tree
    index = {-1: -1}
    for node, parent in enumerate(tree.parents):
        if parent in index and tree.children[parent + 1].index(node) < width:
            index[node] = len(index) - 1
    return Tree(tuple(index[tree.parents[node]] for node in index if node >= 0))


@lru_cache(maxsize=256)
def limit_depth(tree: Tree, depth: int) -> Tree:
    """The tree without nodes deeper than `depth` tokens."""
    if tree.depth <= depth:
        return tree
    left = [node for node in range(tree.nodes) if tree.depths[node] < depth]
    index = {node: place for place, node in enumerate(left)} | {-1: -1}
    return Tree(tuple(index[tree.parents[node]] for node in left))


Paths = Sequence[Sequence[Sequence[int]]]  # rows, nodes, drafted tokens


@dataclass(frozen=True)
class NodePrefix:
    """The tokens before each node (row, node), for logits processors.

    They are those of the row, and the drafted ones of the node's own path. Drafted tokens are read
    from their device once, when they are first used.
    """

    prompt: Callable[[int], Sequence[int]]  # of a row as it was given, padding included
    generated: Sequence[Sequence[int]]  # committed new tokens of each row
    device: torch.device
    read_paths: Callable[[], Paths] | None = None  # None = every node follows the committed tokens

    def __call__(self, row: int, node: int) -> Tensor:  # (L,)
        drafted = self.paths[row][node] if self.paths is not None else ()
        return torch.cat((self._committed[row], self._committed[row].new_tensor([*drafted])))

    def drafted(self, row: int, node: int) -> Sequence[int]:
        """The drafted tokens of a node's path."""
        return () if self.paths is None else self.paths[row][node]

    def select(self, rows: Sequence[int]) -> NodePrefix:
        """The prefixes of some rows."""

        def read() -> Paths:
            assert self.paths is not None
            return [self.paths[row] for row in rows]

        return NodePrefix(
            lambda row: self.prompt(rows[row]),
            [self.generated[row] for row in rows],
            self.device,
            None if self.read_paths is None else read,
        )

    @cached_property
    def paths(self) -> Paths | None:
        """Drafted tokens of every node's path; None = there are none."""
        return None if self.read_paths is None else self.read_paths()

    @cached_property
    def _committed(self) -> list[Tensor]:  # (L,) each
        return [
            torch.tensor([*self.prompt(row), *new], dtype=torch.int64, device=self.device)
            for row, new in enumerate(self.generated)
        ]


def paths_of_tree(tokens: Tensor, parents: Sequence[int] | Tensor) -> Paths:
    """The paths after the context (entry 0) and after each node (entry i + 1).

    `tokens` (B, N) are those of the nodes; `parents` (N), or (B, N) where rows differ, are node
    indices, -1 = the context.
    """
    if isinstance(parents, Tensor):
        lines = torch.cat((tokens, parents), 1).tolist()
        count = tokens.shape[1]
        return [_follow(line[:count], line[count:]) for line in lines]
    return [_follow(line, parents) for line in tokens.tolist()]


def paths_of_visible(tokens: Tensor, visible: Tensor) -> Paths:  # (B, m), (B, n, m) bool
    """The paths of n nodes, which include the node itself: the tokens that each one attends to."""
    count, width = visible.shape[1:]
    lines = torch.cat((tokens, visible.flatten(1).to(tokens.dtype)), 1).tolist()
    found = []
    for line in lines:
        own, flags = line[:width], line[width:]
        seen = [flags[node * width : (node + 1) * width] for node in range(count)]
        found.append([[token for token, on in zip(own, row, strict=True) if on] for row in seen])
    return found


def _follow(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths
