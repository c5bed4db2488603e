"""Greedy multi-draft sampling: several sure children and one lucky one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, residual
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind
from mmspec.verifiers.sample_and_match import matching
from mmspec.verifiers.walk import (
    SiblingDescent,
    Siblings,
    Step,
    at_token,
    one_hot,
    proposal,
    without,
)


@dataclass(frozen=True)
class GreedyMultiDraft(SiblingDescent):
    """Verify top k-1 children and one draw from the rest (greedy draft sampling, Hu et al. 2025).

    The draw x ~ q' (q off the top) meets p as in speculative sampling; its correction may name a
    sure child, and the walk goes on there. Lossless; accepts p(top) + sum off the top of min(p,
    q'). One child is `Exact`, two accept as `SpecHub`.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.HUB,)

    def step(self, draft: Draft) -> Step:
        return _step


def drawn_last(family: Siblings) -> tuple[Tensor, Tensor, Tensor]:  # (B,), (B,), (B, V)
    """The one child that was drawn, whether it is there, and the distribution it was drawn from."""
    slot = family.last.clamp_min(0)[:, None]
    x = family.tokens.gather(1, slot).squeeze(1)
    there = family.real.gather(1, slot).squeeze(1)
    q = family.q.probs
    for j, sure in enumerate(family.tokens.unbind(1)):
        q = torch.where((family.real[:, j] & (j < family.last))[:, None], without(q, sure), q)
    return x, there, proposal(Categorical.having(q), x, Kind.HUB).probs


def _step(family: Siblings, noise: Noise, lane: int) -> tuple[Tensor, Tensor]:
    p = family.p.probs
    x, there, q = drawn_last(family)
    hit = noise.flip(torch.where(there, (at_token(p, x) / at_token(q, x)).clamp_max(1), 0), lane)
    correction = noise.pick(torch.where(there[:, None], residual(p, q), p), lane + 1)
    return torch.where(hit, family.last, matching(family, correction)), one_hot(correction, p)
