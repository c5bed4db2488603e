"""Greedy multi-draft sampling: top k-1 children and one sampled child."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, normalise, residual
from mmspec.draft import Draft, Kind
from mmspec.verifiers.branches import Branches, BranchVerifier, Step
from mmspec.verifiers.sample_and_match import match_children
from mmspec.verifiers.walk import gather_token, proposal


@dataclass(frozen=True)
class GreedyMultiDraft(BranchVerifier):
    """Verify top k-1 children and one sample of the rest (greedy draft sampling, Hu et al. 2025).

    The sample x ~ q' (q without the top) is tested as in speculative sampling; if its correction is
    a top child, the walk continues there. Lossless; accepts p(top) + sum off the top of min(p, q').
    One child is `Exact`, two accept as `SpecHub`.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.HUB,)

    def step(self, draft: Draft) -> Step:
        return _step


@dataclass(frozen=True)
class SampledChild:
    """The child of each branch that was sampled after the top ones; `x` where `there`."""

    x: Tensor  # (B, M)
    there: Tensor  # (B, M) bool
    last: Tensor  # (1 or B, M) its slot, padding included
    q: Tensor  # (B, M, V) what it was sampled from

    @classmethod
    def from_branches(cls, branches: Branches) -> SampledChild:
        assert branches.q is not None
        q, tokens, real = branches.q, branches.tokens, branches.real_children()
        last = branches.last_slots()
        x = tokens.gather(2, last[..., None].expand(*tokens.shape[:2], 1)).squeeze(2)
        there = real.expand_as(tokens).gather(2, last[..., None].expand(*x.shape, 1)).squeeze(2)
        slots = torch.arange(tokens.shape[2], device=x.device)
        top = real & (slots < last[..., None])
        kept = torch.where(top, 0, q.gather(-1, tokens))
        rest = q.scatter_reduce(-1, tokens, kept, "amin")
        rest = torch.where(top.any(-1, keepdim=True), normalise(rest, rest), q)
        return cls(x, there, last, proposal(Categorical.from_probs(rest), x, Kind.HUB).probs)

    def chance(self, p: Tensor) -> Tensor:  # (B, M, V) -> (B, M, 1)
        """Its acceptance by speculative sampling."""
        chance = (gather_token(p, self.x) / gather_token(self.q, self.x)).clamp_max(1)
        return torch.where(self.there, chance, 0)[..., None]

    def is_later(self, count: int) -> Tensor:  # (1 or B, M, C)
        """The slots before it."""
        return torch.arange(count, device=self.x.device) < self.last[..., None]


def _step(branches: Branches) -> tuple[Tensor, Tensor]:
    p, x = branches.p, branches.tokens
    sampled = SampledChild.from_branches(branches)
    chance = sampled.chance(p)
    correction = torch.where(sampled.there[..., None], residual(p, sampled.q), p)
    survival, rest = match_children(correction, x, branches.real, 1 - chance)
    return survival + chance * sampled.is_later(x.shape[-1]), rest
