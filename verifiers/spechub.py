"""SpecHub: two children, one of them always the most likely token of the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.draft import Draft, Kind
from mmspec.verifiers.branches import Branches, BranchVerifier, Step
from mmspec.verifiers.greedy_multidraft import SampledChild


@dataclass(frozen=True)
class SpecHub(BranchVerifier):
    """Transport pairs (top token a, sample x) onto the target (Sun et al. 2024, SpecHub), k = 2.

    The pair {a, x} has mass q'(x) = q(x) / (1 - q(a)). Token x takes up to p(x) of it, the hub a
    takes the remainder, up to p(a); the rest of p is the correction. Lossless, accepts as
    `GreedyMultiDraft` with two children; one child is `Exact`.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.HUB,)

    def step(self, draft: Draft) -> Step:
        if draft.nodes and not draft.is_chain and draft.children().shape[-1] > 2:
            raise ValueError(
                f"SpecHub verifies two children per node, not {draft.children().shape[-1]}; "
                "use GreedyMultiDraft"
            )
        return _step


def _step(branches: Branches) -> tuple[Tensor, Tensor]:
    p, x = branches.p, branches.tokens
    sampled = SampledChild.from_branches(branches)
    there = sampled.there[..., None]
    pair = torch.where(there, sampled.q, 0)
    spill = torch.where(there, (pair - p).clamp_min(0).sum(-1, keepdim=True), 1)  # not taken by x
    first = sampled.chance(p)
    a = x[..., :1]
    hub = branches.real_children()[..., :1] & (sampled.last > 0)[..., None]
    share = (p.gather(-1, a) / spill.clamp_min(torch.finfo(p.dtype).tiny)).clamp_max(1)
    failed = (1 - first) * (1 - torch.where(hub, share, 0))
    left = (p - pair).clamp_min(0)
    kept = left.gather(-1, a) - torch.where(hub, torch.minimum(p.gather(-1, a), spill), 0)
    survival = failed + first * sampled.is_later(x.shape[-1])
    return survival, left.scatter(-1, a, kept.clamp_min(0))
