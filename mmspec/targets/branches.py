"""Tokens after the committed ones that form a tree: the beams of a search share one cache row.

The prompt and what all beams have in common is committed, once; after it a cache has the nodes of
the tree in their order, so node i of row b is in slot `lengths[b] + i`:

    committed      nodes 0..4       mask of node 4
    the cat        0 sat            0, 3, 4
                   1 ran
                   2   1 off        beams: "the cat ran off", "the cat sat on"
                   3   0 on
                   4     3 a        drafted

After a verification `prune` keeps the paths of the new beams and commits what they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.targets.memory import Memory, TokenBlock


@dataclass(frozen=True)
class Branches:
    """A tree of uncommitted tokens per row; every row has n nodes, parents before children."""

    tokens: Tensor  # (B, n)
    parents: Tensor  # (B, n) node index, -1 = the last committed token
    depths: Tensor  # (B, n) distance from the first uncommitted position
    visible: Tensor  # (B, n, n) bool, [b, i, j]: j is i or an ancestor of i

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> Branches:
        """Trees without nodes."""
        none = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return cls(none, none, none, torch.zeros(batch, 0, 0, dtype=torch.bool, device=device))

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    def extend(self, tokens: Tensor, parents: Tensor) -> Branches:  # (B, k) each
        """Add nodes, whose parents are earlier nodes or -1."""
        count, batch = tokens.shape[1], len(tokens)
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        if self.nodes:
            rows = torch.arange(batch, device=tokens.device)[:, None]
            at, below = parents.clamp_min(0), parents >= 0
            seen = self.visible[rows, at] & below[..., None]
            depths = torch.where(below, self.depths[rows, at] + 1, 0)
        else:
            seen, depths = self.visible.new_zeros(batch, count, 0), torch.zeros_like(parents)
        before = self.visible.new_zeros(batch, self.nodes, count)
        return Branches(
            torch.cat((self.tokens, tokens), 1),
            torch.cat((self.parents, parents), 1),
            torch.cat((self.depths, depths), 1),
            torch.cat((torch.cat((self.visible, before), 2), torch.cat((seen, own), 2)), 1),
        )

    def block(self, first: int, like: Tensor) -> TokenBlock:
        """The nodes from `first` on, read after those before; where `like` is."""
        own = (self.tokens[:, first:], self.depths[:, first:], self.visible[:, first:])
        tokens, depths, corner = (one.to(like.device) for one in own)
        return TokenBlock(tokens, depths, corner, 0, num_preceding=first)

    def prune(self, tips: Sequence[Sequence[int]], limit: int) -> tuple[Branches, Kept]:
        """Keep the paths to the `tips` of every row, and commit what these share.

        A tip -1 is the last committed token. Only nodes below `limit` are committed.
        """
        paths = [
            select_paths(row, ends, limit)
            for row, ends in zip(self.parents.tolist(), tips, strict=True)
        ]
        count = max(len(kept) - shared for kept, shared in paths)
        lines = [kept[shared:] for kept, shared in paths]
        padded = [line + [-1] * (count - len(line)) for line in lines]
        kept = Kept([row for row, _ in paths], [shared for _, shared in paths], lines)
        index = torch.tensor(padded, dtype=torch.int64, device=self.tokens.device)
        return self._select(index, kept), kept

    def _select(self, index: Tensor, kept: Kept) -> Branches:  # (B, m), -1 padded
        """Some of the nodes; padding is seen by no node."""
        rows = torch.arange(len(index), device=index.device)[:, None]
        at, real = index.clamp_min(0), index >= 0
        places = [
            [place.get(parent, -1) for parent in row]
            for place, row in zip(kept.places(), self.parents[rows, at].tolist(), strict=True)
        ]
        visible = self.visible[rows[..., None], at[:, :, None], at[:, None]]
        shared = torch.tensor(kept.committed, device=index.device)[:, None]
        return Branches(
            self.tokens[rows, at],
            index.new_tensor(places).reshape(index.shape),
            (self.depths[rows, at] - shared).clamp_min(0),
            visible & real[:, :, None] & real[:, None],
        )


@dataclass(frozen=True)
class Kept:
    """The nodes that remain after a round, per row in their order."""

    nodes: list[list[int]]
    committed: list[int]  # the first so many of them
    live: list[list[int]]  # the others

    def places(self) -> list[dict[int, int]]:
        """The new index of each node that stays in the tree."""
        return [{node: place for place, node in enumerate(row)} for row in self.live]

    def move(self, memory: Memory, num_read: int) -> None:
        """Make the kept nodes of a cache contiguous, of which it has read `num_read`."""
        width = max(map(len, self.nodes))
        source, target = [], []
        for first, row in zip(memory.lengths, self.nodes, strict=True):
            read = [(node, place) for place, node in enumerate(row) if node < num_read]
            spare = [first - 1] * (width - len(read))  # self-moves
            source.append([first + node for node, _ in read] + spare)
            target.append([first + place for _, place in read] + spare)
        if width and source != target:
            moved, to = (torch.tensor(one, device=memory.like.device) for one in (source, target))
            memory.cache.move(*(one[0] if len(one) == 1 else one for one in (moved, to)))
        memory.advance(self.committed)


@dataclass(frozen=True)
class BeamDraft:
    """The tree that the target reads: kept nodes, the newest token of N beams, drafted levels."""

    tree: Branches
    first: int  # the newest token of the first beam; the target has read the nodes before
    num_beams: int
    width: int = 0  # nodes of each drafted level
    log_probs: Tensor | None = None  # (B, N * V) log q of the first level's candidates

    @property
    def drafted(self) -> int:
        return self.tree.nodes - self.first - self.num_beams

    @property
    def depth(self) -> int:
        return self.drafted // self.width if self.width else 0

    def children(self) -> list[dict[tuple[int, int], int]]:
        """The drafted nodes of each row by parent and token; one transfer from the device."""
        start = self.first + self.num_beams
        if start == self.tree.nodes:
            return [{} for _ in self.tree.tokens]
        pairs = torch.stack((self.tree.parents, self.tree.tokens), -1)[:, start:].tolist()
        return [
            {(parent, token): start + place for place, (parent, token) in enumerate(row)}
            for row in pairs
        ]


def select_paths(parents: Sequence[int], tips: Sequence[int], limit: int) -> tuple[list[int], int]:
    """The nodes on the paths to `tips`, in order, and how many of the first ones all paths share.

    Those are nodes below `limit`.
    """
    needed = set[int]()
    for tip in tips:
        node = tip
        while node >= 0 and node not in needed:
            needed.add(node)
            node = parents[node]
    kept, ends = sorted(needed), set(tips)
    children = dict[int, list[int]]()
    for node in kept:
        children.setdefault(parents[node], []).append(node)
    shared, last = 0, -1
    while last not in ends and len(below := children.get(last, [])) == 1 and below[0] < limit:
        shared, last = shared + 1, below[0]
    return kept, shared


def read_branches(reader: Any, memory: Memory, tree: Branches, first: int) -> Tensor:
    """Logits (B, n - first, V) after the nodes from `first` on; the earlier ones were read."""
    logits, _ = reader.read(memory, tree.block(first, memory.like))
    found: Tensor = logits
    return found
