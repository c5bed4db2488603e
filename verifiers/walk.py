"""What walks share: going down a draft level by level, or finding the deepest node that passed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, normalised
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Rule, RuleSchedule, Scores, Verdict, Verifier, categorical

STRIDE = 1 << 16  # lanes of one level; a level never has that many siblings


@dataclass(frozen=True)
class Siblings:
    """The node that each row has reached, and the children it may go on to."""

    p: Categorical  # (B,) target distribution after the node
    q: Categorical  # (B,) drafter's distribution there, in the dtype of p; p where the draft has none
    tokens: Tensor  # (B, C) the children, in the order they were drawn
    real: Tensor  # (B, C) bool, False = no such child, padding, or the row has stopped
    last: Tensor  # (B,) slot of the last child that was drawn, padding included; -1 = none
    depth: int  # of the children, 0 = below the context


# (family, noise, lane) -> slot (B,) of the accepted child or -1, and weights (B, V) of the next
Step = Callable[[Siblings, Noise, int], tuple[Tensor, Tensor]]


class SiblingDescent(Verifier):
    """Goes down from the context and takes children as its `step` says. Lossless."""

    lossless: ClassVar[bool] = True

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft)
        return descend(draft, scores, noise, self.step(draft))

    @abstractmethod
    def step(self, draft: Draft) -> Step:
        """One level. Raises ValueError for a draft that it is not made for."""


def descend(draft: Draft, scores: Scores, noise: Noise, step: Step) -> Verdict:
    """Walk every row from the context downwards until `step` takes no child."""
    distribution, drafted = categorical(scores.distribution), draft.distribution
    kids, device = draft.children(), draft.tokens.device
    rows = torch.arange(draft.batch, device=device)
    at = torch.zeros_like(rows)  # row of `scores` reached: 0 = context, i + 1 = node i
    open_ = torch.ones_like(rows, dtype=torch.bool)
    weights = torch.zeros_like(distribution.scores[:, 0])
    path: list[Tensor] = []
    deep = widths(draft)
    for depth, width in enumerate(deep):
        if nobody(open_):
            path += [torch.full_like(rows, -1)] * (len(deep) - depth)
            break
        child = kids[rows, at, :width]
        node = child.clamp_min(0)
        real = (child >= 0) & draft.mask.gather(1, node) & open_[:, None]
        p = q = distribution[rows, at]
        if drafted is not None:
            first = node.gather(1, real.int().argmax(-1, keepdim=True)).squeeze(1)
            q = categorical(drafted)[rows, first].evaluated(p.probs)
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


def longest(
    draft: Draft, passed: Tensor, tie: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The deepest node all of whose path passed; ties go to the largest sum of `tie` (B, N) on it.

    `passed` is (B, N). Returns the path (B, D), its length (B,), the row of `scores` it ends at
    (B,).
    """
    kept = ~(draft.ancestors() & ~(passed & draft.mask)[:, None]).any(-1)
    return deepest(draft, kept, tie)


def deepest(draft: Draft, kept: Tensor, tie: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The same among nodes that a path may end at, `kept` (B, N)."""
    ancestors, depths = draft.ancestors(), draft.depths()
    length, node = ((depths + 1) * kept).max(-1)
    if tie is not None:
        total = (ancestors * tie[:, None]).sum(-1)
        node = total.masked_fill(~kept | (depths + 1 != length[:, None]), -torch.inf).argmax(-1)
    row = (node + 1) * (length > 0)
    above = ancestors[torch.arange(draft.batch, device=row.device), node] & (length > 0)[:, None]
    index = torch.arange(draft.nodes, device=row.device).expand_as(depths)
    path = index.new_full((draft.batch, depth_of(draft)), -1)
    path = path.scatter_reduce(1, depths, index.masked_fill(~above, -1), "amax")
    return path, length, row


def widths(draft: Draft) -> list[int]:
    """Most children of any node, level by level."""
    if draft.tree is None:
        return [draft.children().shape[-1]] * depth_of(draft)
    tree = draft.tree
    parents = [(-1,), *tree.levels][: tree.depth]
    return [max(len(tree.kids[node + 1]) for node in level) for level in parents]


def lanes(draft: Draft) -> Tensor:  # (D, C)
    """The lane of every child on every level."""
    wide = widths(draft)
    return _lanes(len(wide), max(wide, default=0), draft.tokens.device)


@lru_cache(maxsize=64)
def _lanes(depth: int, width: int, device: torch.device) -> Tensor:
    levels = torch.arange(depth, device=device)[:, None] * STRIDE
    return Lane.WALK + levels + torch.arange(width, device=device)


def nobody(rows: Tensor) -> bool:
    """Whether a bool tensor is False throughout, on a CPU.

    An accelerator would have to stop for the answer; there a walk goes on and changes nothing.
    """
    return rows.device.type == "cpu" and not bool(rows.any())


def depth_of(draft: Draft) -> int:
    """Tokens on the longest path of any row; asks the device where rows differ in topology."""
    if draft.tree is not None:
        return draft.tree.depth
    return int(draft.depths().max()) + 1 if draft.nodes else 0


def unread(kept: Tensor) -> Verdict:
    """A gate's verdict on chains: the nodes `kept` (B, N), a beginning of each, wait to be read."""
    index = torch.arange(kept.shape[1], device=kept.device)
    return Verdict(torch.where(kept, index, -1), kept.sum(-1), None)


def nothing(scores: Scores, noise: Noise) -> Verdict:
    """The verdict on an empty draft: one token of the target."""
    first = categorical(scores.distribution)[:, 0].probs
    none = torch.empty(first.shape[0], 0, dtype=torch.int64, device=first.device)
    return Verdict(none, none.sum(-1), noise.pick(first, Lane.RESIDUAL))


def proposal(q: Categorical, x: Tensor, kind: Kind) -> Categorical:  # (...) x2 -> (...)
    """The distribution x came from, given what was drawn before it: q, or a point mass where x was chosen.

    A token that q cannot produce was chosen too (a greedy drafter's second child, siblings that
    outnumber the support of q); the point mass is exact for it, however it was chosen.
    """
    point = one_hot(x, q.probs)
    if kind is Kind.DET:
        return Categorical.having(point)
    return Categorical.where(q.prob(x) > 0, q, Categorical(point.log, q.hard, point))


def proposals(draft: Draft, like: Tensor) -> Categorical:  # (B, N)
    """The proposal distribution of every node of a chain, in the dtype of `like` (..., V)."""
    if draft.distribution is None or draft.kind is Kind.DET:
        return Categorical.having(one_hot(draft.tokens, like))
    return proposal(categorical(draft.distribution).evaluated(like), draft.tokens, draft.kind)


def ratio(wanted: Tensor, proposed: Tensor) -> Tensor:  # (...) x2 -> (...)
    """min(1, wanted / proposed), where nothing may be proposed."""
    return (wanted / proposed.clamp_min(torch.finfo(proposed.dtype).tiny)).clamp_max(1)


def at_depth(rule: Rule | RuleSchedule, depth: Tensor | int, longest: int) -> Rule:
    """The rule itself, or the one it has for this depth."""
    return rule.at(depth, longest) if isinstance(rule, RuleSchedule) else rule


def without(q: Tensor, x: Tensor) -> Tensor:  # (..., V), (...) -> (..., V)
    """q without x, normalised; zero everywhere once q is exhausted."""
    rest = q.scatter(-1, x[..., None], 0)
    return normalised(rest, rest)


def one_hot(x: Tensor, like: Tensor) -> Tensor:  # (...), (..., V) -> (..., V)
    """A point mass on x, with the vocabulary, dtype and device of `like`."""
    zeros = torch.zeros(*x.shape, like.shape[-1], dtype=like.dtype, device=like.device)
    return zeros.scatter_(-1, x[..., None], 1)


def at_token(distribution: Tensor, x: Tensor) -> Tensor:  # (..., V), (...) -> (...)
    """The entry of x."""
    return distribution.gather(-1, x[..., None]).squeeze(-1)


def check(
    verifier: Verifier, draft: Draft, *, trees: bool = True, distribution: bool = True
) -> None:
    """Refuse a draft that `verifier` would get wrong: its kind, its shape, its missing distribution."""
    if not draft.nodes:
        return
    name = type(verifier).__name__
    if draft.kind not in verifier.kinds:
        known = ", ".join(kind.name for kind in verifier.kinds)
        raise ValueError(f"{name} cannot verify {draft.kind.name} proposals; it accepts {known}")
    if distribution and draft.distribution is None and draft.kind is not Kind.DET:
        raise ValueError(
            f"{name} needs the distribution that the tokens were drawn from; set Draft.distribution"
        )
    if not trees and not draft.is_chain:
        raise ValueError(
            f"{name} verifies chains only; propose one token per depth with Draft.chain"
        )
