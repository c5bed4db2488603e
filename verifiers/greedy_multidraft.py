"""Greedy multi-draft sampling: top k-1 children and one sampled child."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, residual
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind
from mmspec.verifiers.sample_and_match import find_child
from mmspec.verifiers.walk import (
    SiblingDescent,
    Siblings,
    Step,
    gather_token,
    one_hot,
    proposal,
    remove_token,
)


@dataclass(frozen=True)
class GreedyMultiDraft(SiblingDescent):
    """Verify top k-1 children and one sample of the rest (greedy draft sampling, Hu et al. 2025).

    The sample x ~ q' (q without the top) is tested as in speculative sampling; if its correction is
    a top child, the walk continues there. Lossless; accepts p(top) + sum off the top of min(p, q').
    One child is `Exact`, two accept as `SpecHub`.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.HUB,)

    def step(self, draft: Draft) -> Step:
        return _step


def get_sampled_child(family: Siblings) -> tuple[Tensor, Tensor, Tensor]:  # (B,), (B,), (B, V)
    """The sampled child, whether it exists, and the distribution it was sampled from."""
    slot = family.last.clamp_min(0)[:, None]
    x = family.tokens.gather(1, slot).squeeze(1)
    there = family.real.gather(1, slot).squeeze(1)
    q = family.q.probs
    for j, sure in enumerate(family.tokens.unbind(1)):
        q = torch.where((family.real[:, j] & (j < family.last))[:, None], remove_token(q, sure), q)
    return x, there, proposal(Categorical.from_probs(q), x, Kind.HUB).probs


def _step(family: Siblings, noise: Noise, lane: int) -> tuple[Tensor, Tensor]:
    p = family.p.probs
    x, there, q = get_sampled_child(family)
    hit = noise.flip(
        torch.where(there, (gather_token(p, x) / gather_token(q, x)).clamp_max(1), 0), lane
    )
    correction = noise.pick(torch.where(there[:, None], residual(p, q), p), lane + 1)
    return torch.where(hit, family.last, find_child(family, correction)), one_hot(correction, p)
