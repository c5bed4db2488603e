"""SpecHub: two children, one of them always the most likely token of the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import normalise
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind
from mmspec.verifiers.greedy_multidraft import get_sampled_child
from mmspec.verifiers.walk import SiblingDescent, Siblings, Step, gather_token


@dataclass(frozen=True)
class SpecHub(SiblingDescent):
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


def _step(family: Siblings, noise: Noise, lane: int) -> tuple[Tensor, Tensor]:
    p = family.p.probs
    x, there, pair = get_sampled_child(family)
    pair = torch.where(there[:, None], pair, 0)
    spill = torch.where(there, (pair - p).clamp_min(0).sum(-1), 1)  # mass that x could not take
    first = noise.flip(
        torch.where(there, (gather_token(p, x) / gather_token(pair, x)).clamp_max(1), 0), lane
    )
    hub = family.real[:, 0] & (family.last > 0)
    a = family.tokens[:, 0]
    share = (gather_token(p, a) / spill.clamp_min(torch.finfo(p.dtype).tiny)).clamp_max(1)
    second = noise.flip(torch.where(hub & ~first, share, 0), lane + 1)
    slot = torch.where(first, family.last, torch.where(second, 0, -1))
    left = (p - pair).clamp_min(0)
    kept = gather_token(left, a) - torch.where(hub, torch.minimum(gather_token(p, a), spill), 0)
    return slot, normalise(left.scatter(-1, a[:, None], kept.clamp_min(0)[:, None]), p)
