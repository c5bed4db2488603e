"""Traversal verification: from the leaves of a tree towards its root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.block import scaled_residual, stopping_probability
from mmspec.verifiers.walk import (
    check_draft,
    gather_token,
    one_hot,
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
        return verify_greedy(draft, scores) or _Walk(draft, scores, noise, tree).run()


class _Walk:
    """One post-order walk; a row is done when one of its nodes is accepted."""

    def __init__(self, draft: Draft, scores: Scores, noise: Noise, tree: Tree) -> None:
        self.draft, self.noise, self.tree = draft, noise, tree
        self.distribution = as_categorical(scores.distribution)
        self.open = torch.ones(draft.batch, dtype=torch.bool, device=draft.tokens.device)
        self.row = torch.zeros(draft.batch, dtype=torch.int64, device=draft.tokens.device)
        self.weights = torch.zeros_like(self.distribution[:, 0].probs)
        self.hits = noise.prepare_flips(
            Lane.WALK + torch.arange(tree.nodes + 1, device=self.row.device)
        )

    def run(self) -> Verdict:
        self.visit(0, torch.ones_like(self.weights[:, 0]))
        paths = _paths(self.tree, self.row.device)[self.row]
        return Verdict(paths, (paths >= 0).sum(-1), self.noise.pick(self.weights, Lane.RESIDUAL))

    def visit(self, row: int, rho: Tensor) -> None:
        """Test the nodes below a row of `scores`, then the row; `rho` (B,) is its path ratio."""
        p, kind, kids = self.distribution[:, row].probs, self.draft.kind, self.tree.children[row]
        q = self.draft_probs(kids[0], p) if kids else p
        for kid in kids:
            x, real = self.draft.tokens[:, kid], self.draft.mask[:, kid]
            drawn = proposal(Categorical.from_probs(q), x, kind).probs
            ratio = (rho * gather_token(p, x) / gather_token(drawn, x)).clamp_max(1)
            self.visit(kid + 1, torch.where(real, ratio, 0))
            left = (rho[:, None] * p - drawn).clamp_min(0).sum(-1)
            p = torch.where(real[:, None], scaled_residual(p, drawn, rho), p)
            rho = torch.where(real, stopping_probability(left, rho), rho)
            if kind is Kind.WOR:
                q = torch.where(real[:, None], remove_token(q, x), q)
        self.settle(row, p, rho)

    def draft_probs(self, kid: int, p: Tensor) -> Tensor:  # (B, V)
        if self.draft.distribution is None:
            return one_hot(self.draft.tokens[:, kid], p)
        return as_categorical(self.draft.distribution)[:, kid].probs.to(p)

    def settle(self, row: int, p: Tensor, rho: Tensor) -> None:
        """Accept the row with probability rho; the context accepts all remaining rows."""
        taken = self.open
        if row > 0:
            chance = torch.where(taken & self.draft.mask[:, row - 1], rho, 0)
            taken = taken & self.hits((row,), chance)
        self.row = torch.where(taken, row, self.row)
        self.weights = torch.where(taken[:, None], p, self.weights)
        self.open = self.open & ~taken


def _paths(tree: Tree, device: torch.device) -> Tensor:  # (N + 1, D)
    """The path that ends at the context (row 0) and at each node, -1 padded."""
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(tree.parents):
        paths.append([*paths[parent + 1], node])
    padded = [path + [-1] * (tree.depth - len(path)) for path in paths]
    return torch.tensor(padded, dtype=torch.int64, device=device)
