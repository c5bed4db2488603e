"""Token recycling: the target's discarded candidates for a token are proposed when it recurs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush

import torch
from torch import Tensor

from mmspec.distributions.categorical import as_categorical
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.drafters.lookup.candidate_memory import CandidateMemory
from mmspec.drafters.shapes import StaticTree
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree, limit_depth

WIDTH = 8  # candidates stored per token

# How often the token that follows is the candidate of each rank. A guess for text, no measurement:
# only the shape of the tree depends on it.
RANKS = (0.50, 0.15, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)

# `product_tree(RANKS, nodes=32, depth=6)`, in paths of ranks.
TREE = Tree.from_digits(
    "0 1 2 3 4 5 6 7 00 01 02 03 04 10 11 20 30 40 000 001 002 010 020 100 200 0000 0001 0010 "
    "0100 1000 00000 000000"
)


class TokenRecycling(Drafter):
    """Fill a fixed tree from the candidates last stored for each token (Luo et al. 2024).

    After each forward the `WIDTH` best tokens after every node, rejected ones included, replace the
    stored candidates of the node's token; of several nodes with the same token the last one counts.
    The draft starts at the last committed token and is empty until that token has been scored.
    Children of a node are ordered by rank.

    All rows of a batch share the table, which is empty at the start of a request. Without `fresh`
    later requests go on filling it, as in the authors' code: outputs that repeat each other gain
    most. A `memory` is the same as an object, which is saved, cleared and shared by threads. The
    table decides what is drafted, never what is output: greedy and coupled tokens are the same with
    any table. Rejection sampling keeps the distribution too, but its draws depend on the draft;
    there a seed reproduces its tokens only with `fresh`.
    """

    kinds: tuple[Kind, ...] = (Kind.DET,)
    uses_trees: bool = True

    def __init__(
        self, tree: Tree = TREE, fresh: bool = True, memory: CandidateMemory | None = None
    ) -> None:
        if tree.width > WIDTH:
            raise ValueError(
                f"the tree has a node with {tree.width} children, but {WIDTH} candidates are "
                "stored per token; give a narrower tree"
            )
        self.tree, self.fresh, self.memory = tree, fresh, memory
        self.tables: dict[tuple[int, torch.device], Tensor] = {}  # by vocabulary and device

    def begin(self, context: Context) -> RecyclingState:
        key = (context.vocabulary, context.device)
        if self.memory is not None:
            return RecyclingState(self.memory.table(blank(*key)))
        if self.fresh or key not in self.tables:
            self.tables[key] = blank(*key)
        return RecyclingState(self.tables[key])

    def propose(self, context: Context, state: RecyclingState) -> Draft:
        last = [row[-1] for row in context.history]
        state.last = torch.tensor(last, device=context.device)[:, None]
        tree = limit_depth(self.tree, max_useful_length(context))
        if not tree.nodes:
            return Draft.empty(context.batch, context.device)
        active = [token for token, done in zip(last, context.finished, strict=True) if not done]
        if not state.contains_any(active):
            return Draft.empty(context.batch, context.device)
        tokens, mask = fill(tree, state.table, state.last)
        return Draft.from_tree(tree, tokens, Kind.DET, mask=mask)

    def observe(
        self, context: Context, state: RecyclingState, draft: Draft, scores: Scores, round_: Round
    ) -> RecyclingState:
        assert state.last is not None, "a draft is proposed before it is scored"
        distribution = as_categorical(scores.distribution)
        running = torch.tensor([[bool(row)] for row in round_.tokens], device=state.last.device)
        read = torch.cat((state.last, draft.tokens), 1)
        known = torch.cat((running, running & draft.mask), 1)
        with nullcontext() if self.memory is None else self.memory.lock:
            update_table(state.table, read, known, distribution.scores)
        return state


@dataclass
class RecyclingState:
    """The table, and the state of a request."""

    table: Tensor  # (V + 1, WIDTH) int64 candidates after each token, -1 = none
    last: Tensor | None = None  # (B, 1) the parents of the draft's first level
    known_tokens: set[int] = field(default_factory=set)  # tokens known to be in the table

    def contains_any(self, tokens: Sequence[int]) -> bool:
        """Whether the table has any of `tokens`; reads only new ones from the device."""
        if any(token in self.known_tokens for token in tokens):
            return True
        first = self.table[torch.tensor(tokens, device=self.table.device), 0].tolist()
        self.known_tokens.update(
            token for token, best in zip(tokens, first, strict=True) if best >= 0
        )
        return any(best >= 0 for best in first)


def blank(vocabulary: int, device: torch.device) -> Tensor:  # (V + 1, WIDTH)
    """An empty table; its last row receives the writes that must not count."""
    return torch.full((vocabulary + 1, WIDTH), -1, dtype=torch.int64, device=device)


def fill(tree: Tree, table: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and mask (B, N) of a tree below `last` (B, 1), level by level.

    A masked node holds the last token, so that it can be looked up and read like any other.
    """
    tokens, mask = last, torch.ones_like(last, dtype=torch.bool)
    for parents, ranks in _levels(tree, last.device):
        found = table[tokens[:, parents], ranks]
        known = (found >= 0) & mask[:, parents]
        tokens = torch.cat((tokens, torch.where(known, found, last)), 1)
        mask = torch.cat((mask, known), 1)
    order = _order(tree, last.device)
    return tokens[:, order], mask[:, order]


def update_table(table: Tensor, read: Tensor, known: Tensor, scores: Tensor) -> None:
    """Write the best of `scores` (B, M, V) into the rows of the tokens `read` (B, M), in place.

    Nothing is written where `known` (B, M) is False; of equal tokens the last one counts. No row
    that is read later is written twice, so the result does not depend on the order of writes.
    """
    best = scores.topk(min(WIDTH, scores.shape[-1]), -1)
    ids = torch.where(best.values > -torch.inf, best.indices, -1).flatten(0, 1)
    token, counts = read.flatten(), known.flatten()
    later = torch.ones(len(token), len(token), dtype=torch.bool, device=token.device).triu(1)
    match_suffix = ((token[:, None] == token) & counts & later).any(-1)
    row = torch.where(counts & ~match_suffix, token, table.shape[0] - 1)
    table[row, : ids.shape[-1]] = ids


@lru_cache(maxsize=16)
def product_tree(ranks: tuple[float, ...], nodes: int, depth: int) -> Tree:
    """The `nodes` most probable nodes, by the product of the ranks on their paths.

    Greedy is optimal: no node is more probable than its parent or than the sibling ranked before
    it.
    """
    if list(ranks) != sorted(ranks, reverse=True) or not 0 < ranks[-1] <= ranks[0] < 1:
        raise ValueError(f"rank probabilities {ranks} must fall from below 1 and stay above 0")
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-ranks[0], 1, (0,))]
    # most probable first, then the shallower, then the smaller ranks
    while heap and len(paths) < nodes:
        weight, level, path = heappop(heap)
        paths.append(path)
        if path[-1] + 1 < len(ranks):
            sibling = weight / ranks[path[-1]] * ranks[path[-1] + 1]
            heappush(heap, (sibling, level, (*path[:-1], path[-1] + 1)))
        if level < depth:
            heappush(heap, (weight * ranks[0], level + 1, (*path, 0)))
    return Tree.from_ranks(paths)


@lru_cache(maxsize=64)
def _levels(tree: Tree, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """Per level: indices of the parents (0 = the last token) in level order, and the ranks."""
    index = {-1: 0}
    for level in tree.levels:
        for node in level:
            index[node] = len(index)
    ranks = {node: rank for kids in tree.children for rank, node in enumerate(kids)}
    return tuple(
        (
            torch.tensor([index[tree.parents[node]] for node in level], device=device),
            torch.tensor([ranks[node] for node in level], device=device),
        )
        for level in tree.levels
    )


@lru_cache(maxsize=64)
def _order(tree: Tree, device: torch.device) -> Tensor:  # (N,)
    """Index of each node in level order; the last token is 0."""
    order = {node: place for place, node in enumerate((n for lv in tree.levels for n in lv), 1)}
    return torch.tensor([order[node] for node in range(tree.nodes)], device=device)


def token_recycling(kit: Kit) -> Drafter:
    """A tree of the target's own runner-up tokens."""
    if not isinstance(kit.shape, StaticTree):
        raise ValueError(
            "token recycling fills a static tree; give tree= branching widths or a Tree"
        )
    memory = kit.load_option("memory", CandidateMemory)
    return TokenRecycling(kit.shape.tree, kit.options["fresh"], memory)
