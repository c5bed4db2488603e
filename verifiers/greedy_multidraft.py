"""Greedy multi-draft sampling: top k-1 children and one sampled child."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.draft import Draft, Kind
from mmspec.trees import expand_rows, row_indices
from mmspec.verifiers.branches import Branches, BranchVerifier, Step


@dataclass(frozen=True)
class GreedyMultiDraft(BranchVerifier):
    """Verify top k-1 children and one sample of the rest (greedy draft sampling, Hu et al. 2025).

    The sample x ~ q' (q without the top) is tested as in speculative sampling; if its correction is
    a top child, the walk continues there. Lossless; accepts p(top) + sum off the top of min(p, q').
    One child is `Exact`, two accept as `SpecHub`.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.HUB,)

    def step(self, draft: Draft) -> Step:
        return verify_top_and_sample


def verify_top_and_sample(branches: Branches) -> tuple[Tensor, Tensor]:
    """The step: the last child x is a sample of q', the others are the top of q.

    A failed test draws from r = (p - q')+, so top child t is accepted with r(t) / sum r, and the
    next token comes from r without the children. A sample with q'(x) = 0 counts as deterministic:
    accepted with p(x), then removed from p.
    """
    assert branches.q is not None
    p, q, x = branches.p, branches.q, branches.tokens
    last, tiny = expand_rows(branches.last, len(x)), torch.finfo(p.dtype).tiny
    before = row_indices(x.shape[2], x.device) < last
    is_top = before & branches.real_children() if branches.has_gaps else before
    sample = x.gather(2, last)
    q = q.scatter_reduce(-1, x, q.gather(-1, x).masked_fill_(is_top, 0), "amin")  # not normalised
    drawn, children = q.gather(-1, sample), p.gather(-1, x)
    share = (drawn > 0) / q.sum(-1, keepdim=True).clamp_min_(tiny)
    tested = (drawn * share).masked_fill_(share == 0, 1)
    chance = (p.gather(-1, sample) / tested).clamp_max_(1)
    top = children * is_top
    removed: Tensor | int = 0
    if branches.has_gaps:
        real = branches.real_children()
        there = real.gather(2, last)
        chance, share = chance * there, share * there
        removed = children * ~real.any(-1, keepdim=True)
    rest = p.addcmul_(q, share, value=-1).clamp_min_(0).scatter_(-1, x, removed)
    taken = top.cumsum(-1)
    total = taken[..., -1:] + rest.sum(-1, keepdim=True)
    failure = 1 - chance
    survival = torch.addcmul(failure, taken, failure / total.clamp_min_(tiny), value=-1)
    return survival + chance * before, rest
