"""Drafts of retrieved branches: a tree per row, and the shape of recipes that draft them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.draft import Draft, Kind
from mmspec.recipe import TREE, Kit
from mmspec.targets.tokens.context import Context

Nodes = tuple[Sequence[int], Sequence[int]]  # tokens, parents (-1 = the context)


@dataclass(frozen=True)
class RetrievedTree:
    """A tree of up to `nodes` retrieved tokens per row."""

    nodes: int
    walk: ClassVar[str] = TREE

    @property
    def description(self) -> str:
        return f"retrieved branches, at most {self.nodes} nodes"


def nodes_of(kit: Kit) -> int:
    """The size of the tree. Raises ValueError for other shapes."""
    if not isinstance(kit.shape, RetrievedTree):
        raise ValueError(
            "retrieval decides the branches of its tree; give tree=RetrievedTree(nodes) of "
            "mmspec.drafters.lookup.retrieved_tree, or recipe='suffix' for chains"
        )
    return kit.shape.nodes


def merge_branches(branches: Iterable[Sequence[int]], limit: int, depth: int) -> Nodes:
    """A tree of the branches, equal prefixes merged; earlier branches first, up to `limit`."""
    index: dict[tuple[int, int], int] = {}
    tokens, parents = list[int](), list[int]()
    for branch in branches:
        node = -1
        for token in branch[:depth]:
            found = index.get((node, token))
            if found is None:
                if len(tokens) == limit:
                    break
                found = index[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = found
    return tokens, parents


def pad_trees(context: Context, rows: Sequence[Nodes], depth: int) -> Draft:
    """One draft of a tree per row, masked where rows are smaller; no path exceeds `depth`."""
    width = max((len(tokens) for tokens, _ in rows), default=0)
    if not width:
        return context.empty_draft()
    tokens, parents, mask = [], [], []
    for (own, above), text in zip(rows, context.history, strict=True):
        missing = width - len(own)
        tokens.append([*own, *text[-1:] * missing])  # the target reads the padding too
        parents.append([*above, *[-1] * missing])
        mask.append([True] * len(own) + [False] * missing)
    device = context.device
    ids, above_ids = torch.tensor(tokens, device=device), torch.tensor(parents, device=device)
    real = torch.tensor(mask, device=device)
    return Draft(ids, above_ids, real, Kind.DET, max_depth=min(depth, width))
