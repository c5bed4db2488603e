"""Traversal verification: from the leaves of a tree towards its root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import Tree, expand_rows, row_indices
from mmspec.verifiers.branches import NEVER, Branches, BranchLayout, gather_branches
from mmspec.verifiers.walk import check_draft, path_table, verify_empty, verify_greedy


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
    branches = gather_branches(draft, probs, plan.layout)
    survival = (1 - _test_children(branches, draft.kind, plan)).cumprod(-1)
    place = noise.choose(survival, plan.level, 1, Lane.WALK).squeeze(1)
    path, end = plan.ends[place].split([tree.depth, 3], 1)
    length, row, branch = end.unbind(1)
    batch = row_indices(draft.batch, device)
    rest = branches.p[batch, branch]
    left = rest.lerp(probs[batch, row], plan.share[place].to(probs))
    return Verdict(path, length, noise.pick(left, Lane.RESIDUAL))


def _test_children(branches: Branches, kind: Kind, plan: _Plan) -> Tensor:
    """Test the children of all branches of a level, one after the other.

    Returns the probability (B, 1, N + 1) that each row passes, in post-order, and leaves in
    `branches.p` the weights of the next token after each branch. A branch keeps L = rho p and w =
    sum L + 1 - rho: a child drawn from q has the ratio L(x) / (w q(x)), and leaves (L - w q)+. No
    ratio follows on the last child of a branch; those of all branches are removed at once.
    """
    p, q, tiny = branches.p, branches.q, torch.finfo(branches.p.dtype).tiny
    scales = _find_scales(branches, kind)
    tests, firsts = _list_tests(branches, scales, plan), _divide_first(branches, scales.tested)
    parts = zip(
        plan.levels,
        p.split(plan.sizes, 1),
        repeat(None) if q is None else q.split(plan.sizes, 1),
        firsts.split(plan.sizes, 1),
        strict=False,
    )
    ratios, rhos, wholes = list[Tensor](), [expand_rows(plan.one, len(p))], list[Tensor]()
    for level, left, own, first in parts:
        gap: Tensor | float = tiny  # 1 - rho
        if level.places is not None:
            rhos.append(ratios[-1][:, level.places])
            left.mul_(rhos[-1])
            first = first * rhos[-1]
            gap = (1 - rhos[-1]).clamp_min_(tiny) if len(level.counts) > 1 else tiny
        found, tails, whole = [first], list[Tensor](), expand_rows(level.ones, len(p))
        for count in level.counts[1:]:
            if count < whole.shape[1]:
                whole, tail = whole.split([count, whole.shape[1] - count], 1)
                tails.insert(0, tail)
                left, gap = left[:, :count], gap if isinstance(gap, float) else gap[:, :count]
                own = None if own is None else own[:, :count]
            test = next(tests)
            share = test.share if len(found) == 1 or test.share is None else test.share * whole
            whole = _remove(left, own, test.before, share, test.is_before) + gap
            ratio = left.gather(-1, test.after)
            ratio = ratio / (whole if test.tested is None else whole * test.tested)
            found.append(ratio if test.is_after is None else ratio * test.is_after)
        ratios.append((torch.cat(found, 1) if len(found) > 1 else first).clamp_max(1))
        wholes += [whole, *tails]
    share = None if scales.share is None else scales.share[:, plan.branches, plan.last]
    share = None if share is None else share * torch.cat(wholes, 1)
    exists = _masked(branches)
    real = None if exists is None else exists.any(-1, keepdim=True)
    mass = _remove(p, q, branches.tokens, share, real)
    stops = mass / (mass + (1 - torch.cat(rhos, 1))).clamp_min_(tiny)
    return torch.cat((*ratios, stops), 1)[..., 0][:, plan.passing]


def _remove(
    left: Tensor, drawn: Tensor | None, x: Tensor, share: Tensor | None, real: Tensor | None
) -> Tensor:  # (B, M, 1)
    """Remove rejected tokens from L (B, M, V) in place; returns what is left of its sum."""
    if drawn is not None and share is not None:
        left.addcmul_(drawn, share, value=-1).clamp_min_(0)
    if real is None:
        left.scatter_(-1, x, 0)
    else:
        left.scatter_(-1, x, left.gather(-1, x) * ~real)
    return left.sum(-1, keepdim=True)


def _masked(branches: Branches) -> Tensor | None:  # (B, M, C)
    """Which children are real, where some of them may be padding."""
    return branches.real if branches.has_gaps else None


class _Scales(NamedTuple):
    """Of each child the factor of q, 0 for a deterministic one, and q(x) times that, else 1.

    (B, M, C); None = all are deterministic.
    """

    share: Tensor | None
    tested: Tensor | None


def _find_scales(branches: Branches, kind: Kind) -> _Scales:
    """Without replacement a child is drawn from q without the siblings before it.

    A token with q(x) = 0 counts as deterministic.
    """
    q, x, real = branches.q, branches.tokens, branches.real
    if q is None:
        return _Scales(None, None)
    drawn = q.gather(-1, x)
    own = drawn if real is None else drawn * real
    is_certain = own < torch.finfo(q.dtype).tiny
    if kind is Kind.WOR and x.shape[-1] > 1:
        masked = _masked(branches)
        kept = 0 if masked is None else drawn * ~masked.any(-1, keepdim=True)
        others = q.scatter(-1, x, kept).sum(-1, keepdim=True)
        left = own.cumsum(-1).add_(others)  # of q, before each child; the last comes first
        share = left.masked_fill_(is_certain, torch.inf).reciprocal_()
    else:
        share = (~is_certain).to(q.dtype)
    return _Scales(share, (own * share).masked_fill_(is_certain, 1))


def _divide_first(branches: Branches, tested: Tensor | None) -> Tensor:  # (B, M, 1)
    """The ratio p(x) / q(x) of the first child of each branch."""
    ratio, real = branches.p.gather(-1, branches.tokens), _masked(branches)
    ratio = ratio if tested is None else ratio / tested
    return (ratio if real is None else ratio * real)[..., -1:]


class _Test(NamedTuple):
    """A child of some branches of a level that has failed, and the one tested after it."""

    before: Tensor  # (B, m, 1) tokens
    after: Tensor
    share: Tensor | None  # of the one before
    tested: Tensor | None  # of the one after
    is_before: Tensor | None  # (B, m, 1) bool, whether they are real; None = all are
    is_after: Tensor | None


def _list_tests(branches: Branches, scales: _Scales, plan: _Plan) -> Iterator[_Test]:
    """The tests of all children but the first ones, in order."""
    if not plan.tests:
        return iter(())

    def select(values: Tensor | None, columns: Tensor) -> Sequence[Tensor | None]:
        if values is None:
            return [None] * len(plan.tests)
        parts: Sequence[Tensor] = values[:, plan.tested, columns].split(plan.tests, 1)
        return parts

    tokens, before, after = branches.tokens, plan.before, plan.after
    both = tokens[:, plan.tested_twice, plan.before_and_after].split(plan.tests * 2, 1)
    real = _masked(branches)
    return map(
        _Test,
        both[: len(plan.tests)],
        both[len(plan.tests) :],
        select(scales.share, before),
        select(scales.tested, after),
        select(real, before),
        select(real, after),
    )


@dataclass(frozen=True)
class _Level:
    """The branches of one level; those with more children come first."""

    counts: tuple[int, ...]  # per rank, how many have such a child
    places: Tensor | None  # (m,) of them among the children of the level before; None = the context
    ones: Tensor  # (1, m, 1)


@dataclass(frozen=True)
class _Plan:
    """Branches (rows of `scores` with children; 0 = context, i + 1 = node i) level by level.

    Children are tested level by level, first ones before second ones.
    """

    layout: BranchLayout  # with the children of each branch from the last to the first
    levels: tuple[_Level, ...]
    sizes: tuple[int, ...]  # branches of each level
    tests: tuple[int, ...]  # branches in each test of a child after the first
    tested: Tensor  # (T, 1) branches of all these
    before: Tensor  # (T, 1) columns of the child before; the one after is a column less
    after: Tensor
    tested_twice: Tensor  # (2 T, 1)
    before_and_after: Tensor  # (2 T, 1)
    branches: Tensor  # (M, 1) 0, 1, ...
    last: Tensor  # (M, 1) columns of the last children
    one: Tensor  # (1, 1, 1) 1., rho of the context
    level: Tensor  # (1, 1) 0
    passing: Tensor  # (1, N + 1) in post-order: places among all children, then branches
    ends: Tensor  # (N + 2, D + 3) in post-order, the last twice: path, its length, row, branch
    share: Tensor  # (N + 2, 1) of p in the next token: 1 for leaves, else `NEVER`


@lru_cache(maxsize=64)
def _plan(tree: Tree, device: torch.device) -> _Plan:
    def visit(row: int) -> list[int]:
        return [one for kid in tree.children[row] for one in visit(kid + 1)] + [row]

    def on(values: object) -> Tensor:
        return torch.tensor(values, device=device)

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)[:, None]

    kids, wide = tree.children, tree.width
    levels = [[0], *([node + 1 for node in level] for level in tree.levels)]
    inner = [sorted(level, key=lambda row: -len(kids[row])) for level in levels]
    inner = [own for level in inner if (own := [row for row in level if kids[row]])]
    rows, order = [row for level in inner for row in level], visit(0)
    branch = {row: at for at, row in enumerate(rows)}
    made, place, tested = list[_Level](), dict[int, int](), list[tuple[int, int]]()
    tests, start = list[int](), 0
    for level in inner:
        ranks = [[row for row in level if len(kids[row]) > rank] for rank in range(wide)]
        counts = tuple(len(own) for own in ranks if own)
        places = on([place[row] - start for row in level]) if made else None
        made.append(_Level(counts, places, torch.ones(1, counts[0], 1, device=device)))
        start = len(place)
        for rank, own in enumerate(ranks):
            first = len(place)
            place |= {kids[row][rank] + 1: first + at for at, row in enumerate(own)}
        tests += counts[1:]
        tested += [(branch[row], rank) for rank, own in enumerate(ranks) for row in own if rank]
    nodes, ends = len(place), list[list[int]]()
    for row in (*order, 0):
        path = path_table(tree, torch.device("cpu"))[row].tolist()
        ends.append([*path, sum(node >= 0 for node in path), row, branch.get(row, 0)])
    at = column([branch for branch, _ in tested])
    after = column([wide - 1 - rank for _, rank in tested])
    return _Plan(
        _lay_out(tree, rows, device),
        tuple(made),
        tuple(map(len, inner)),
        tuple(tests),
        at,
        after + 1,
        after,
        torch.cat((at, at)),
        torch.cat((after + 1, after)),
        column(list(range(len(rows)))),
        column([wide - len(kids[row]) for row in rows]),
        torch.ones(1, 1, 1, device=device),
        on([[0]]),
        on([[nodes + branch[row] if row in branch else place[row] for row in order]]),
        on(ends),
        on([[NEVER if row in branch else 1.0] for row in (*order, 0)]),
    )


def _lay_out(tree: Tree, rows: Sequence[int], device: torch.device) -> BranchLayout:
    """The branches with their children from the last to the first, on the right."""
    kids, wide = tree.children, tree.width
    table = [[kids[row][0]] * (wide - len(kids[row])) + [*kids[row][::-1]] for row in rows]
    exists = torch.tensor([[at >= wide - len(kids[row]) for at in range(wide)] for row in rows])
    none = torch.zeros(0, dtype=torch.int64, device=device)  # what `_traverse` does not read
    return BranchLayout(
        torch.tensor(rows, device=device),
        torch.tensor(table, device=device),
        None if bool(exists.all()) else exists[None].to(device),
        (),
        none,
        none,
        none,
        none,
        tuple(kids[row][0] for row in rows),
    )
