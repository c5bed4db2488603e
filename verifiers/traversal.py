"""Traversal verification: from the leaves of a tree towards its root."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import Tree, row_indices
from mmspec.verifiers.branches import NEVER
from mmspec.verifiers.walk import check_draft, one_hot, path_table, verify_empty, verify_greedy


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
        if not draft.nodes:
            return verify_empty(scores, noise)
        return verify_greedy(draft, scores) or _traverse(draft, scores, noise, tree)


def _traverse(draft: Draft, scores: Scores, noise: Noise, tree: Tree) -> Verdict:
    """Visit the nodes in post-order; the first one that passes is the end of the path."""
    device = draft.tokens.device
    plan, probs = _plan(tree, device), as_categorical(scores.distribution).probs
    passing, rest = _test_children(draft, probs, plan)
    survival = (1 - passing).cumprod(-1)[:, None]  # the context is last and passes
    place = noise.choose(survival, plan.level, 1, Lane.WALK)[:, 0].clamp_max(tree.nodes)
    row, batch = plan.order[place], row_indices(draft.batch, device)
    path = path_table(tree, device)[row]
    left = rest[batch, plan.branch[row]].lerp(probs[batch, row], plan.share[row].to(probs))
    return Verdict(path, (path >= 0).sum(-1), noise.pick(left, Lane.RESIDUAL))


def _test_children(draft: Draft, probs: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Test the children of all branches of a level, one after the other.

    Returns the probability (B, N + 1) that each row passes, in post-order, and the weights (B, M,
    V) of the next token after each branch. A branch keeps m = rho p, whose sum is rho: a child
    drawn from q has the ratio m(x) / q(x), and leaves (m - q)+ / (Z + 1 - rho).
    """
    drawn, x = _find_proposals(draft, probs, plan), draft.tokens[:, plan.nodes, None]
    parts = [drawn, x, drawn.gather(-1, x)]
    if draft.padded:
        parts.append(draft.mask[:, plan.nodes, None])
    counts = [count for level in plan.steps for count in level]
    tests = zip(*(part.split(counts, 1) for part in parts), strict=True)
    rows = probs[:, plan.rows].split([level[0] for level in plan.steps], 1)
    tiny = torch.finfo(probs.dtype).tiny
    ratios, stops, rest = list[Tensor](), list[Tensor](), list[Tensor]()
    rho = torch.ones_like(rows[0][..., :1])
    for level, own in enumerate(plan.steps):
        if level:
            rho = torch.cat(ratios, 1)[:, plan.places[level - 1]]
        m = rows[level] * rho  # (B, M, V)
        for count, (q, token, share, *real) in zip(own, tests, strict=False):
            if count < m.shape[1]:  # the others have no such child
                (m, done), (rho, stop) = (one.tensor_split([count], 1) for one in (m, rho))
                rest.append(done)
                stops.append(stop)
            ratio, left = (m.gather(-1, token) / share).clamp_max(1), (m - q).clamp_min(0)
            mass = left.sum(-1, keepdim=True)
            whole = (mass + (1 - rho)).clamp_min(tiny)
            found: Any = (ratio, left / whole, mass / whole)
            if real:
                found = map(partial(torch.where, *real), found, (0, m, rho))
            ratio, m, rho = found
            ratios.append(ratio)
        rest.append(m)
        stops.append(rho)
    return torch.cat((*ratios, *stops), 1)[:, plan.passing, 0], torch.cat(rest, 1)


def _find_proposals(draft: Draft, like: Tensor, plan: _Plan) -> Tensor:  # (B, N, V)
    """The distribution that each node was drawn from, in the order of `plan.nodes`.

    Without replacement, q without the siblings before it. A token with q(x) = 0 counts as
    deterministic.
    """
    x = draft.tokens[:, plan.nodes]
    point = one_hot(x, like)
    if draft.distribution is None or draft.kind is Kind.DET:
        return point
    q = as_categorical(draft.distribution)[:, plan.first].probs.to(like)[:, plan.parents]
    if draft.kind is Kind.WOR and plan.siblings.shape[1] > 1:
        tokens, gone = draft.tokens[:, plan.siblings], plan.is_earlier
        if draft.padded:
            gone = gone & draft.mask[:, plan.siblings]
        q = q.scatter_reduce(-1, tokens, torch.where(gone, 0, q.gather(-1, tokens)), "amin")
        q = q / q.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
    return torch.where(q.gather(-1, x[..., None]) > 0, q, point)


@dataclass(frozen=True)
class _Plan:
    """Branches (rows of `scores` with children; 0 = context, i + 1 = node i) and their nodes.

    Nodes are tested level by level, first children before second ones. Of a level, branches with
    more children come first.
    """

    steps: tuple[tuple[int, ...], ...]  # per level and rank, how many branches have such a child
    rows: Tensor  # (M,) branches by level
    first: Tensor  # (M,) their first children
    nodes: Tensor  # (N,) in the order of tests
    parents: Tensor  # (N,) branch of each
    siblings: Tensor  # (N, C) by rank, the first again where there are fewer
    is_earlier: Tensor  # (N, C) bool
    places: tuple[Tensor, ...]  # per level but the first: its branches in `nodes`
    level: Tensor  # (1, 1) 0
    order: Tensor  # (N + 1,) rows in post-order
    passing: Tensor  # (N + 1,) their places in `nodes`, then branches as they are done
    branch: Tensor  # (N + 1,) of each row as they are done, 0 for leaves
    share: Tensor  # (N + 1, 1) of p in the next token: 1 for leaves, else `NEVER`


@lru_cache(maxsize=64)
def _plan(tree: Tree, device: torch.device) -> _Plan:
    def visit(row: int) -> list[int]:
        return [one for kid in tree.children[row] for one in visit(kid + 1)] + [row]

    def on(values: object) -> Tensor:
        return torch.tensor(values, device=device)

    levels = [[0], *([node + 1 for node in level] for level in tree.levels)]
    inner = [[row for row in level if tree.children[row]] for level in levels]
    inner = [sorted(level, key=lambda row: -len(tree.children[row])) for level in inner if level]
    steps, tested, done = [], [], []
    for level in inner:
        ranks = range(len(tree.children[level[0]]))
        own = [[row for row in level if len(tree.children[row]) > rank] for rank in ranks]
        steps.append(tuple(map(len, own)))
        tested += [(row, rank) for rank in ranks for row in own[rank]]
        done += [
            row
            for more, fewer in zip(own, [*own[1:], []], strict=True)
            for row in more[len(fewer) :]
        ]
    rows, order = [row for level in inner for row in level], visit(0)
    nodes = [tree.children[row][rank] for row, rank in tested]
    place = {node + 1: at for at, node in enumerate(nodes)}
    end = {row: at for at, row in enumerate(done)}
    families = [tree.children[row] for row, _ in tested]
    return _Plan(
        tuple(steps),
        on(rows),
        on([tree.children[row][0] for row in rows]),
        on(nodes),
        on([rows.index(row) for row, _ in tested]),
        on([(own + own[:1] * tree.width)[: tree.width] for own in families]),
        on([[at < rank for at in range(tree.width)] for _, rank in tested]),
        tuple(on([place[row] for row in level]) for level in inner[1:]),
        on([[0]]),
        on(order),
        on([len(nodes) + end[row] if row in end else place[row] for row in order]),
        on([end.get(row, 0) for row in range(tree.nodes + 1)]),
        on([[NEVER if row in end else 1.0] for row in range(tree.nodes + 1)]),
    )
