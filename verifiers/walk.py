"""Functions shared by tree walks: level-by-level descent, and the deepest accepted node."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.distributions.categorical import Categorical, as_categorical, normalise
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Rule, RuleSchedule, Scores, Verdict, Verifier
from mmspec.trees import Tree, row_column, row_indices

STRIDE = 1 << 16  # noise lanes per level, more than the siblings of any node


@dataclass(frozen=True)
class Siblings:
    """The node that each row has reached, and its children."""

    p: Categorical  # (B,) target distribution after the node
    q: Categorical  # (B,) draft distribution there, in the dtype of p; p if the draft has none
    tokens: Tensor  # (B, C) the children, in the order of sampling
    real: Tensor  # (B, C) bool, False = no such child, padding, or the row has stopped
    last: Tensor  # (B,) slot of the last sampled child, padding included; -1 = none
    depth: int  # of the children, 0 = below the context


# (family, noise, lane) -> slot (B,) of the accepted child or -1, and weights (B, V) of the next
Step = Callable[[Siblings, Noise, int], tuple[Tensor, Tensor]]


class SiblingDescent(Verifier):
    """Descends from the context; `step` accepts children, level by level. Lossless."""

    lossless: ClassVar[bool] = True

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft)
        step = self.step(draft)
        return verify_greedy(draft, scores) or descend(draft, scores, noise, step)

    @abstractmethod
    def step(self, draft: Draft) -> Step:
        """The function for one level. Raises ValueError for a draft that it cannot verify."""


def descend(draft: Draft, scores: Scores, noise: Noise, step: Step) -> Verdict:
    """Walk every row from the context downwards until `step` accepts no child."""
    distribution, drafted = as_categorical(scores.distribution), draft.distribution
    kids, device = draft.children(), draft.tokens.device
    rows = torch.arange(draft.batch, device=device)
    at = torch.zeros_like(rows)  # row of `scores` reached: 0 = context, i + 1 = node i
    open_ = torch.ones_like(rows, dtype=torch.bool)
    weights = torch.zeros_like(distribution.scores[:, 0])
    path: list[Tensor] = []
    deep = max_children_per_level(draft)
    for depth, width in enumerate(deep):
        if is_all_false(open_):
            path += [torch.full_like(rows, -1)] * (len(deep) - depth)
            break
        child = kids[rows, at, :width]
        node = child.clamp_min(0)
        real = (child >= 0) & draft.mask.gather(1, node) & open_[:, None]
        p = q = distribution[rows, at]
        if drafted is not None:
            first = node.gather(1, real.int().argmax(-1, keepdim=True)).squeeze(1)
            q = as_categorical(drafted)[rows, first].evaluate(p.probs)
        tokens = draft.tokens.gather(1, node)
        family = Siblings(p, q, tokens, real, (child >= 0).sum(-1) - 1, depth)
        slot, left = step(family, noise, Lane.WALK + STRIDE * depth)
        moved = open_ & (slot >= 0)
        weights = torch.where((open_ & ~moved)[:, None], left, weights)
        chosen = child.gather(1, slot.clamp_min(0)[:, None]).squeeze(1)
        path.append(torch.where(moved, chosen, -1))
        at = torch.where(moved, chosen + 1, at)
        open_ = moved
    weights = torch.where(
        open_[:, None], distribution[rows, at].probs, weights
    )  # bonus below a deepest leaf
    nodes = (
        torch.stack(path, 1) if path else torch.empty(draft.batch, 0, dtype=at.dtype, device=device)
    )
    return Verdict(nodes, (nodes >= 0).sum(-1), noise.pick(weights, Lane.RESIDUAL))


def verify_greedy(draft: Draft, scores: Scores) -> Verdict | None:
    """The verdict of lossless rules on point masses: they accept the target's tokens and no other.

    None if the target samples. It needs no probabilities, no noise, and nothing on the host.
    """
    distribution = as_categorical(scores.distribution)
    return verify_tokens(draft, distribution.mode) if distribution.hard else None


def verify_tokens(draft: Draft, own: Tensor) -> Verdict:
    """Accept the path that equals the target's tokens `own` (B, N + 1, *E): row 0, then nodes."""
    if draft.is_chain or not draft.nodes:
        hits = ~_differ(own[:, :-1], draft.tokens)
        accepted = (hits & draft.mask if draft.padded else hits).cumprod(-1)
        length = row = accepted.sum(-1)
        path = accepted * _count_from_one(draft.nodes, accepted.device) - 1
    elif draft.tree is not None:
        above = parent_rows(draft.tree, own.device)
        path, length, row = find_failed_path(draft, _differ(own[:, above], draft.tokens))
    else:
        rows = row_column(draft.batch, own.device)
        path, length, row = find_failed_path(
            draft, _differ(own[rows, draft.parents + 1], draft.tokens)
        )
    return Verdict(path, length, own[row_indices(draft.batch, row.device), row])


def _differ(left: Tensor, right: Tensor) -> Tensor:  # (B, N, *E) x2 -> (B, N)
    differs = left != right
    return differs if differs.dim() == 2 else differs.flatten(2).any(-1)


@lru_cache(maxsize=64)
def _count_from_one(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device)


def find_failed_path(draft: Draft, failed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`find_longest_path` without the nodes that failed (B, N), and those below them."""
    if draft.padded:
        failed = failed | ~draft.mask
    if draft.tree is not None:
        depth, below, paths = _ends(draft.tree, failed.device)
        length, row = torch.addmm(depth, failed.float(), below).max(-1)
        return paths[row], length.long(), row
    has_failed = (draft.reach * failed[:, None]).any(-1)
    length, row = draft.scored_depths.masked_fill(has_failed, -1).max(-1)
    places, nodes = _count_down(draft.nodes, row.device)  # the first node has the largest
    ends = draft.reach[row_indices(draft.batch, row.device), row] * places
    return nodes[ends.topk(draft_depth(draft), -1).values.long()], length, row


@lru_cache(maxsize=64)
def _count_down(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places N, ..., 1 of N nodes (float), and the node at each place from 0 = none, -1, on."""
    places = torch.arange(count, 0, -1, device=device)
    return places.float(), functional.pad(places.flip(0).neg() + count, (1, 0), value=-1)


@lru_cache(maxsize=64)
def _ends(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For a path that ends at each row of `scores`: length, penalty of failed nodes, its nodes.

    (N + 1,) float; (N, N + 1) float, below any length where the node is on the path; (N + 1, D)
    node indices, -1 padded.
    """
    paths = _paths(tree)
    below = torch.zeros(tree.nodes, tree.nodes + 1)
    for row, path in enumerate(paths):
        below[path, row] = -8192.0  # exact in every format of matrix products
    length = torch.tensor([float(len(path)) for path in paths])
    return length.to(device), below.to(device), path_table(tree, device)


def _paths(tree: Tree) -> list[list[int]]:
    """The nodes from the context to each row of `scores`."""
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(tree.parents):
        paths.append([*paths[parent + 1], node])
    return paths


@lru_cache(maxsize=64)
def path_table(tree: Tree, device: torch.device) -> Tensor:  # (N + 1, D)
    """The path that ends at each row of `scores`, -1 padded."""
    padded = [path + [-1] * (tree.depth - len(path)) for path in _paths(tree)]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(tree.nodes + 1, tree.depth)


@lru_cache(maxsize=64)
def parent_rows(tree: Tree, device: torch.device) -> Tensor:  # (N,)
    """The row of `scores` that predicts each node."""
    return torch.tensor([parent + 1 for parent in tree.parents], device=device)


def find_longest_path(
    draft: Draft, passed: Tensor, tie: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The deepest node whose whole path passed; ties go to the largest path sum of `tie` (B, N).

    `passed` is (B, N). Returns the path (B, D), its length (B,), the row of `scores` it ends at
    (B,).
    """
    accepted = ~(draft.ancestors() & ~(passed & draft.mask)[:, None]).any(-1)
    return find_deepest_path(draft, accepted, tie)


def find_deepest_path(
    draft: Draft, accepted: Tensor, tie: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The deepest path that ends at a node of `accepted` (B, N); ties and result as above."""
    ancestors, depths = draft.ancestors(), draft.depths()
    length, node = ((depths + 1) * accepted).max(-1)
    if tie is not None:
        total = (ancestors * tie[:, None]).sum(-1)
        node = total.masked_fill(~accepted | (depths + 1 != length[:, None]), -torch.inf).argmax(-1)
    row = (node + 1) * (length > 0)
    above = ancestors[torch.arange(draft.batch, device=row.device), node] & (length > 0)[:, None]
    index = torch.arange(draft.nodes, device=row.device).expand_as(depths)
    path = index.new_full((draft.batch, draft_depth(draft)), -1)
    path = path.scatter_reduce(1, depths, index.masked_fill(~above, -1), "amax")
    return path, length, row


def max_children_per_level(draft: Draft) -> list[int]:
    """The largest number of children of any node, per level."""
    if draft.tree is None:
        return [draft.children().shape[-1]] * draft_depth(draft)
    tree = draft.tree
    parents = [(-1,), *tree.levels][: tree.depth]
    return [max(len(tree.children[node + 1]) for node in level) for level in parents]


def child_lanes(draft: Draft) -> Tensor:  # (D, C)
    """The noise lane of every child on every level."""
    wide = max_children_per_level(draft)
    return _lanes(len(wide), max(wide, default=0), draft.tokens.device)


@lru_cache(maxsize=64)
def _lanes(depth: int, width: int, device: torch.device) -> Tensor:
    levels = torch.arange(depth, device=device)[:, None] * STRIDE
    return Lane.WALK + levels + torch.arange(width, device=device)


def is_all_false(rows: Tensor) -> bool:
    """Whether a bool tensor is all False; always False off the CPU.

    Reading it on an accelerator would synchronise; there a walk continues without effect.
    """
    return rows.device.type == "cpu" and not bool(rows.any())


def draft_depth(draft: Draft) -> int:
    """Tokens on the longest path of any row, or a bound; reads it where rows differ without one."""
    if draft.tree is not None:
        return draft.tree.depth
    if draft.max_depth is not None:
        return draft.max_depth
    return int(draft.depths().max()) + 1 if draft.nodes else 0


def accept_unverified(accepted: Tensor) -> Verdict:
    """A gate's verdict on chains: accept a prefix, `accepted` (B, N); the target reads it later."""
    index = torch.arange(accepted.shape[1], device=accepted.device)
    return Verdict(torch.where(accepted, index, -1), accepted.sum(-1), None)


def verify_empty(scores: Scores, noise: Noise) -> Verdict:
    """The verdict on an empty draft: one token sampled from the target."""
    first = as_categorical(scores.distribution)[:, 0].probs
    none = torch.empty(first.shape[0], 0, dtype=torch.int64, device=first.device)
    return Verdict(none, none.sum(-1), noise.pick(first, Lane.RESIDUAL))


def proposal(q: Categorical, x: Tensor, kind: Kind) -> Categorical:  # (...) x2 -> (...)
    """The distribution from which x was proposed: q, or a point mass for deterministic proposals.

    A token with q(x) = 0 counts as deterministic (the second child of a greedy drafter, more
    siblings than the support of q); the point mass is exact for it.
    """
    point = one_hot(x, q.probs)
    if kind is Kind.DET:
        return Categorical.from_probs(point)
    return Categorical.where(q.prob(x) > 0, q, Categorical(point.log, q.hard, point))


def proposals(draft: Draft, like: Tensor) -> Categorical:  # (B, N)
    """The proposal distribution of every node of a chain, in the dtype of `like` (..., V)."""
    if draft.distribution is None or draft.kind is Kind.DET:
        return Categorical.from_probs(one_hot(draft.tokens, like))
    return proposal(as_categorical(draft.distribution).evaluate(like), draft.tokens, draft.kind)


def ratio(p: Tensor, q: Tensor) -> Tensor:  # (...) x2 -> (...)
    """min(1, p / q); q may be 0."""
    return (p / q.clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1)


def rule_at_depth(rule: Rule | RuleSchedule, depth: Tensor | int, longest: int) -> Rule:
    """The rule, or that of a schedule for this depth."""
    return rule.at(depth, longest) if isinstance(rule, RuleSchedule) else rule


def remove_token(q: Tensor, x: Tensor) -> Tensor:  # (..., V), (...) -> (..., V)
    """q without x, normalised; zero everywhere if no mass is left."""
    rest = q.scatter(-1, x[..., None], 0)
    return normalise(rest, rest)


def one_hot(x: Tensor, like: Tensor) -> Tensor:  # (...), (..., V) -> (..., V)
    """A point mass on x, with the vocabulary, dtype and device of `like`."""
    zeros = torch.zeros(*x.shape, like.shape[-1], dtype=like.dtype, device=like.device)
    return zeros.scatter_(-1, x[..., None], 1)


def gather_token(distribution: Tensor, x: Tensor) -> Tensor:  # (..., V), (...) -> (...)
    """The entry of x."""
    return distribution.gather(-1, x[..., None]).squeeze(-1)


def check_draft(
    verifier: Verifier, draft: Draft, *, trees: bool = True, distribution: bool = True
) -> None:
    """Check that `verifier` supports the kind and shape of a draft, and has its distribution.

    Raises ValueError otherwise.
    """
    if not draft.nodes:
        return
    name = type(verifier).__name__
    if draft.kind not in verifier.kinds:
        kinds = ", ".join(kind.name for kind in verifier.kinds)
        raise ValueError(f"{name} cannot verify {draft.kind.name} proposals; it accepts {kinds}")
    if distribution and draft.distribution is None and draft.kind is not Kind.DET:
        raise ValueError(
            f"{name} needs the distribution that the tokens were drawn from; set Draft.distribution"
        )
    if not trees and not draft.is_chain:
        raise ValueError(
            f"{name} verifies chains only; propose one token per depth with Draft.chain"
        )
