"""Traversal verification: from the leaves of a tree towards its root."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, as_categorical, row_index
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import Tree, row_indices
from mmspec.verifiers.block import scaled_residual, stopping_probability
from mmspec.verifiers.walk import (
    check_draft,
    gather_token,
    one_hot,
    path_table,
    proposal,
    remove_token,
    verify_greedy,
)


@dataclass(frozen=True)
class Traversal(Verifier):
    """Leaf-to-root verification of a tree (Weng et al. 2025), lossless.

    A node carries the ratio rho of its path; each rejected child changes p to norm((rho p - q)+).
    On a chain it is `Block`, on one level `Recursive`; it never accepts less than `Recursive`. The
    steps are derived from the paper's text and proved by enumeration (no reference code is public).
    Visits every node, so all rows of a batch must share one tree.
    """

    lossless: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True  # acceptance depends on later tokens
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.WOR, Kind.IID, Kind.DET)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft)
        tree = draft.tree
        if tree is None:
            if draft.batch > 1:
                raise ValueError(
                    "Traversal walks one tree for all rows, but Draft.tree is not set; "
                    "draft the same topology in every row, verify row by row, or use Recursive"
                )
            tree = Tree(tuple(draft.parents[0].tolist()))
        return verify_greedy(draft, scores) or _traverse(draft, scores, noise, tree)


def _traverse(draft: Draft, scores: Scores, noise: Noise, tree: Tree) -> Verdict:
    """Visit the nodes in post-order; the first one that passes is the end of the path."""
    walk = _Walk(draft, as_categorical(scores.distribution).probs, tree)
    for rows in walk.plan.levels:
        walk.test_children(rows)
    order, device = walk.plan.order, draft.tokens.device
    passing = torch.stack([walk.rho[row] for row in order], -1)  # the context is last and passes
    survival = (1 - passing).cumprod(-1)[:, None]
    level = torch.zeros(1, 1, dtype=torch.int64, device=device)
    place = noise.choose(survival, level, 1, Lane.WALK)[:, 0].clamp_max(len(order) - 1)
    row = row_index(order, device)[place]
    path = path_table(tree, device)[row]
    weights = torch.stack(walk.rest, 1)[row_indices(draft.batch, device), row]
    return Verdict(path, (path >= 0).sum(-1), noise.pick(weights, Lane.RESIDUAL))


@dataclass(frozen=True)
class _Plan:
    """Rows of `scores` (0 = context, i + 1 = node i) by level, and in post-order."""

    levels: tuple[tuple[int, ...], ...]  # those with children; more children come first
    order: tuple[int, ...]


@lru_cache(maxsize=64)
def _plan(tree: Tree) -> _Plan:
    def visit(row: int) -> list[int]:
        return [one for kid in tree.children[row] for one in visit(kid + 1)] + [row]

    rows = [(0,), *(tuple(node + 1 for node in level) for level in tree.levels)]
    inner = [tuple(row for row in level if tree.children[row]) for level in rows]
    ordered = [sorted(level, key=lambda row: -len(tree.children[row])) for level in inner]
    return _Plan(tuple(tuple(level) for level in ordered if level), tuple(visit(0)))


class _Walk:
    """Ratio and next distribution of every row, level by level from the context."""

    def __init__(self, draft: Draft, probs: Tensor, tree: Tree) -> None:
        self.draft, self.tree, self.plan = draft, tree, _plan(tree)
        self.rest = list(probs.unbind(1))  # (B, V) each: of the token after the row
        self.rho = [torch.ones_like(probs[:, 0, 0])] * (tree.nodes + 1)  # (B,) each

    def test_children(self, rows: tuple[int, ...]) -> None:
        """Test the children of rows of one level, one after the other in all of them."""
        kids, kind = [self.tree.children[row] for row in rows], self.draft.kind
        p = torch.stack([self.rest[row] for row in rows], 1)  # (B, M, V)
        rho = torch.stack([self.rho[row] for row in rows], 1)  # (B, M)
        q = self.draft_probs([own[0] for own in kids], p)
        for rank in range(len(kids[0])):
            last = [own[rank] for own in kids if len(own) > rank]
            if len(last) < p.shape[1]:  # rows without such a child are done
                self.keep(rows, p, rho)
                rows, p, rho = rows[: len(last)], p[:, : len(last)], rho[:, : len(last)]
                q = None if q is None else q[:, : len(last)]
            index = row_index(tuple(last), p.device)
            x, real = self.draft.tokens[:, index], self.draft.mask[:, index]
            own = one_hot(x, p) if q is None else q
            drawn = proposal(Categorical.from_probs(own), x, kind).probs
            ratio = (rho * gather_token(p, x) / gather_token(drawn, x)).clamp_max(1)
            for node, one in zip(last, torch.where(real, ratio, 0).unbind(1), strict=True):
                self.rho[node + 1] = one
            left = (rho[..., None] * p - drawn).clamp_min(0).sum(-1)
            p = torch.where(real[..., None], scaled_residual(p, drawn, rho), p)
            rho = torch.where(real, stopping_probability(left, rho), rho)
            if kind is Kind.WOR and q is not None:
                q = torch.where(real[..., None], remove_token(q, x), q)
        self.keep(rows, p, rho)

    def keep(self, rows: tuple[int, ...], p: Tensor, rho: Tensor) -> None:
        """What is left of some rows after their children."""
        for row, own, one in zip(rows, p.unbind(1), rho.unbind(1), strict=True):
            self.rest[row], self.rho[row] = own, one

    def draft_probs(self, nodes: list[int], like: Tensor) -> Tensor | None:  # (B, M, V)
        if self.draft.distribution is None:
            return None
        own = as_categorical(self.draft.distribution)
        return own[:, row_index(tuple(nodes), like.device)].probs.to(like)
