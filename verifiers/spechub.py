"""SpecHub: two children, one of them always the drafter's favourite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import normalised
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind
from mmspec.verifiers.greedy_multidraft import drawn_last
from mmspec.verifiers.walk import SiblingDescent, Siblings, Step, at_token


@dataclass(frozen=True)
class SpecHub(SiblingDescent):
    """Transport pairs (favourite a, draw x) onto the target (Sun et al. 2024, SpecHub), k = 2.

    The pair {a, x} has mass q'(x) = q(x) / (1 - q(a)). Token x takes up to p(x) of it, the hub a
    takes what is left over, up to p(a); the rest of p is the correction. Lossless, accepts as
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
    x, there, pair = drawn_last(family)
    pair = torch.where(there[:, None], pair, 0)
    spill = torch.where(there, (pair - p).clamp_min(0).sum(-1), 1)  # mass that x could not take
    first = noise.flip(
        torch.where(there, (at_token(p, x) / at_token(pair, x)).clamp_max(1), 0), lane
    )
    hub = family.real[:, 0] & (family.last > 0)
    a = family.tokens[:, 0]
    share = (at_token(p, a) / spill.clamp_min(torch.finfo(p.dtype).tiny)).clamp_max(1)
    second = noise.flip(torch.where(hub & ~first, share, 0), lane + 1)
    slot = torch.where(first, family.last, torch.where(second, 0, -1))
    left = (p - pair).clamp_min(0)
    kept = at_token(left, a) - torch.where(hub, torch.minimum(at_token(p, a), spill), 0)
    return slot, normalised(left.scatter(-1, a[:, None], kept.clamp_min(0)[:, None]), p)
