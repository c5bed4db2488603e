"""Verification of all siblings of a draft at once: no step per level, nothing read by the host.

How often each child of a node is accepted does not depend on how the node was reached. So a
verifier computes it for all nodes that have children, one number is drawn per level, and the path
follows from both.

    context  a b          branches   0 (context)   1 (a)   2 (b)
             a - c d      children   a b           c d     e
             b - e        slot       1             0       0        path  b e
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, as_categorical, row_index
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import Tree, row_column, row_indices
from mmspec.verifiers.walk import (
    check_draft,
    draft_depth,
    find_failed_path,
    find_longest_path,
    verify_empty,
    verify_greedy,
)

NEVER = 1e-30  # share of p where the residual cannot be empty but for rounding
STEP = 8  # branches


@dataclass(frozen=True)
class Branches:
    """The M nodes that have children (the context is one), and their C children at most.

    Branches with more children come first where all rows share a tree. A step may overwrite `p`.
    """

    p: Tensor  # (B, M, V) target probabilities after the node
    q: Tensor | None  # (B, M, V) draft probabilities there, in the dtype of p
    tokens: Tensor  # (B, M, C) the children, in the order of sampling
    real: Tensor | None  # (1 or B, M, C) bool, False = no such child, or padding; None = all real
    counts: tuple[int, ...]  # per rank, how many of the first branches may have such a child
    last: Tensor  # (1 or B, M, 1) slot of the last child, padding included
    has_gaps: bool = False  # whether any of those may still lack it: padding, or rows that differ
    sizes: tuple[int, ...] = ()  # children of each branch, where there are no gaps

    def real_children(self) -> Tensor:  # (1 or B, M, C)
        """`real`, also where all are."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.real is None else self.real


# Probability (B, M, C) that a child and all before it fail, and weights (B, M, V), not negative, of
# the next token where no child is accepted (all 0 where that has probability 0)
Step = Callable[[Branches], tuple[Tensor, Tensor]]


class BranchVerifier(Verifier):
    """Verifies every branch by `step`; exact if all of its steps are."""

    lossless: ClassVar[bool] = True

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft)
        step = self.step(draft)
        return verify_greedy(draft, scores) or verify_branches(draft, scores, noise, step)

    @abstractmethod
    def step(self, draft: Draft) -> Step:
        """The function for all branches. Raises ValueError for a draft it cannot verify."""


def verify_branches(draft: Draft, scores: Scores, noise: Noise, step: Step) -> Verdict:
    """Accept the path that `step` and the noise of every level give."""
    if not draft.nodes:
        return verify_empty(scores, noise)
    layout = find_branches(draft)
    probs = as_categorical(scores.distribution).probs
    survival, rest = step(gather_branches(draft, probs, layout))
    slot = noise.choose(survival, layout.level, draft_depth(draft), Lane.WALK)
    path, length, row = layout.find_path(draft, slot)
    batch = row_indices(draft.batch, row.device)
    left = rest[batch, layout.branch[row]].lerp(probs[batch, row], layout.share[row].to(probs))
    return Verdict(path, length, noise.pick(left, Lane.RESIDUAL))


@dataclass(frozen=True)
class BranchLayout:
    """Where the branches of a draft are."""

    rows: Tensor | None  # (M,) rows of `scores`; None = all N + 1
    children: Tensor  # (M, C) or (B, M, C) node indices, the first again where there are no more
    exists: Tensor | None  # (1 or B, M, C) bool, None = all
    counts: tuple[int, ...]
    last: Tensor  # (1 or B, M, 1) slot of the last child
    level: Tensor  # (M, 1) or (B, M, 1) depth of the children
    branch: Tensor  # (N + 1,) branch of each row of `scores`, 0 for leaves
    share: Tensor  # (N + 1, 1) of p in the next token: 1 for leaves, else `NEVER`
    first: tuple[int, ...] = ()  # first child of each branch, for shared trees
    sizes: tuple[int, ...] = ()  # children of each branch, for shared trees
    parent: Tensor | None = None  # (N,) branch of each node's parent, for shared trees
    rank: Tensor | None = None  # (N,) index of each node among its siblings

    def find_path(self, draft: Draft, slot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Path (B, D), length (B,) and last row of `scores` (B,) for the accepted slots (B, M)."""
        if self.parent is not None and self.rank is not None:
            return find_failed_path(draft, slot[:, self.parent] != self.rank)
        width = self.children.shape[-1]
        chosen = self.children.gather(2, slot.clamp_max(width - 1)[..., None]).squeeze(2)
        chosen = torch.where(slot < width, chosen, -1)
        index = torch.arange(draft.nodes, device=slot.device)
        return find_longest_path(draft, chosen.gather(1, draft.parents + 1) == index)


def find_branches(draft: Draft) -> BranchLayout:
    """The layout of a draft; reads the largest number of children where rows differ."""
    if draft.tree is not None:
        return _shared_layout(draft.tree, draft.tokens.device)
    children = draft.children()
    count = draft.nodes + 1
    rows = torch.arange(count, device=children.device)
    level = torch.cat((draft.depths()[:, :1] * 0, draft.depths() + 1), 1)
    return BranchLayout(
        None,
        torch.where(children >= 0, children, children[..., :1].clamp_min(0)),
        children >= 0,
        (count,) * children.shape[-1],
        ((children >= 0).sum(-1, keepdim=True) - 1).clamp_min_(0),
        level.clamp_max(draft_depth(draft) - 1)[..., None],  # leaves have no children
        rows,
        torch.full((count, 1), NEVER, device=rows.device),
    )


@lru_cache(maxsize=64)
def _shared_layout(tree: Tree, device: torch.device) -> BranchLayout:
    sizes = [len(row) for row in tree.children]
    rows = sorted((row for row, size in enumerate(sizes) if size), key=lambda row: -sizes[row])
    place = {row: branch for branch, row in enumerate(rows)}
    wide = tree.width
    table = [(tree.children[row] + tree.children[row][:1] * wide)[:wide] for row in rows]
    exists = [[rank < sizes[row] for rank in range(wide)] for row in rows]
    depths = [0, *(depth + 1 for depth in tree.depths)]
    ranks = [tree.children[up + 1].index(node) for node, up in enumerate(tree.parents)]

    def on(values: object) -> Tensor:
        return torch.tensor(values, device=device)

    return BranchLayout(
        on(rows),
        on(table),
        None if all(map(all, exists)) else on(exists)[None],
        _merge_counts([sum(sizes[row] > rank for row in rows) for rank in range(wide)]),
        on([[[sizes[row] - 1] for row in rows]]),
        on([[depths[row]] for row in rows]),
        on([place.get(row, 0) for row in range(tree.nodes + 1)]),
        on([[NEVER if row in place else 1.0] for row in range(tree.nodes + 1)]),
        tuple(tree.children[row][0] for row in rows),
        tuple(sizes[row] for row in rows),
        on([place[up + 1] for up in tree.parents]),
        on(ranks),
    )


def _merge_counts(counts: Sequence[int]) -> tuple[int, ...]:
    """Counts that fall in large steps only: a few more rows cost less than more operations."""
    merged = list(counts[:1])
    for count in counts[1:]:
        merged.append(count if merged[-1] - count >= STEP else merged[-1])
    return tuple(merged)


def gather_branches(draft: Draft, probs: Tensor, layout: BranchLayout) -> Branches:
    """The distributions and tokens of all branches; `probs` (B, N + 1, V) are the target's."""
    children, drafted, real = layout.children, draft.distribution, layout.exists
    has_gaps = layout.rows is None or draft.padded
    if has_gaps:
        children = children.expand(draft.batch, -1, -1)
        mask = draft.mask.gather(1, children.flatten(1)).view_as(children)
        real = mask if real is None else mask & real
        first = children.gather(2, real.int().argmax(-1, keepdim=True))
        children = torch.where(real, children, first)
    if has_gaps:
        tokens = draft.tokens.gather(1, children.flatten(1)).view_as(children)
    else:
        tokens = draft.tokens[:, children]
    p = probs.clone() if layout.rows is None else probs[:, layout.rows]
    q = None
    if drafted is not None and draft.kind is not Kind.DET:
        own = as_categorical(drafted)
        if has_gaps:
            batch = row_column(draft.batch, children.device)
            own = own[batch, children[..., 0]]
        else:
            own = _first_of(own, layout.first)
        q = own.probs.to(p)
    return Branches(p, q, tokens, real, layout.counts, layout.last, has_gaps, layout.sizes)


def _first_of(drafted: Categorical, nodes: tuple[int, ...]) -> Categorical:  # (B, M)
    """The distributions that some nodes were drawn from."""
    rows = nodes
    if drafted.repeats is not None:
        drafted, repeated = drafted.repeats
        rows = tuple(repeated[node] for node in nodes)
    if rows == tuple(range(drafted.batch[1])):
        return drafted
    return drafted[:, row_index(rows, drafted.scores.device)]


def reject_one_by_one(branches: Branches, kind: Kind) -> tuple[Tensor, Tensor]:
    """Recursive rejection (`Recursive`): min(1, p / q) per sibling, p <- norm((p - q)+) after it.

    A sibling that q cannot produce counts as deterministic: accepted with p(x), then removed from
    p. Siblings without replacement are tested with q without the earlier ones; p is 0 there, so
    scaling q is enough. p is not normalised in between: `masses` are what is left of it.
    """
    x, rest, q, real = branches.tokens, branches.p, branches.q, branches.real
    drawn, share = (None, None) if q is None else _proposal_scale(branches, kind)
    kept = None if real is None or not branches.has_gaps else ~real.any(-1, keepdim=True)
    shares = () if share is None else share.split(1, -1)
    found, masses = list[Tensor](), list[Tensor]()
    own = rest
    for j, token in enumerate(x.split(1, -1)):
        found.append(rest.gather(-1, token))
        if q is not None:
            own, q = (_first(one, branches.counts[j]) for one in (own, q))
            scale = shares[j] * masses[-1] if masses else shares[j]
            own.addcmul_(q, _first(scale, branches.counts[j]), value=-1).clamp_min_(0)
        if kept is None:
            rest.scatter_(-1, token, 0)
        else:
            rest.scatter_(-1, token, found[-1] * kept)
        if j + 1 < x.shape[-1]:
            masses.append(rest.sum(-1, keepdim=True))
    chance = torch.cat(found, -1)
    expected = torch.cat((torch.ones_like(masses[0]), *masses), -1) if masses else None
    if drawn is not None and share is not None:
        tested = (drawn * share).masked_fill_(share == 0, 1)
        expected = tested if expected is None else expected * tested
    if expected is not None:
        chance = chance / expected.clamp_min_(torch.finfo(rest.dtype).tiny)
    if real is not None and branches.has_gaps:
        chance = chance * real
    return (1 - chance.clamp_max_(1)).cumprod(-1), rest


def _proposal_scale(branches: Branches, kind: Kind) -> tuple[Tensor, Tensor]:
    """q(x) (B, M, C), and the factor of q that each sibling is tested with; 0 = deterministic."""
    q, x, real = branches.q, branches.tokens, branches.real
    assert q is not None
    drawn = q.gather(-1, x)
    if kind is not Kind.WOR or x.shape[-1] == 1:
        known = drawn > 0 if real is None else (drawn > 0) & real
        return drawn, known.to(q.dtype)
    own = drawn if real is None else drawn * real
    kept = 0 if real is None or not branches.has_gaps else drawn * ~real.any(-1, keepdim=True)
    others = (q.scatter(-1, x, kept)).sum(-1, keepdim=True)
    left = own.flip(-1).cumsum(-1).flip(-1).add_(others)  # of q, before each sibling
    return drawn, (own > 0) / left.clamp_min_(torch.finfo(q.dtype).tiny)


def _first(values: Tensor, count: int) -> Tensor:
    """The first branches."""
    return values if count == values.shape[1] else values[:, :count]
