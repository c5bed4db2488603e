"""Two drafts per node: choose one of them, then verify it as in speculative sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import residual
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind
from mmspec.verifiers.walk import SiblingDescent, Siblings, Step, gather_token, one_hot, ratio

ITERATIONS = 32  # of the fixed point in `choice_weights`


@dataclass(frozen=True)
class TwoStep(SiblingDescent):
    """Importance-weighted choice of one of two samples, then its test (Khisti et al. 2024), k = 2.

    The chosen token has a known distribution r, against which it is accepted with min(1, p/r) and
    corrected from norm((p - r)+): lossless for any choice. The weights bring r
    near to p, so that acceptance is close to the bound of optimal transport (`transport`), mostly
    on it. Reconstructed: they come from a fixed point over the tokens in the order of p/q, one
    weight per token, in place of a linear program over pairs of a few tokens. One child is `Exact`.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def step(self, draft: Draft) -> Step:
        if draft.nodes and not draft.is_chain and draft.children().shape[-1] > 2:
            raise ValueError(
                f"TwoStep verifies two children per node, not {draft.children().shape[-1]}; use "
                "Recursive or KSeq"
            )
        return _step


def _step(family: Siblings, noise: Noise, lane: int) -> tuple[Tensor, Tensor]:
    p, q = family.p.probs, family.q.probs
    first = family.tokens[:, 0]
    there = family.real[:, 0]
    if family.tokens.shape[1] == 1:
        slot, chosen_law, both = torch.zeros_like(first), q, torch.zeros_like(there)
    else:
        both = family.real.all(-1)
        order, weight = choice_weights(p, q)
        place = order.argsort(-1)
        places = place.gather(1, family.tokens)  # of both, 0 = the largest p/q
        leader = places.argmin(-1)
        share = weight.gather(1, places.gather(1, leader[:, None]))[:, 0]
        taken = noise.flip(torch.where(both, share, 1), lane + 1)
        slot = torch.where(both & ~taken, 1 - leader, torch.where(both, leader, 0))
        law = choice_law(q.gather(1, order), weight).gather(1, place)
        chosen_law = torch.where(both[:, None], law, q)
    x = family.tokens.gather(1, slot[:, None])[:, 0]
    drawn = q.gather(1, x[:, None])[:, 0] > 0  # else deterministic: a greedy drafter's second child
    r = torch.where(drawn[:, None], chosen_law, one_hot(x, p))
    hit = noise.flip(torch.where(there, ratio(gather_token(p, x), gather_token(r, x)), 0), lane)
    left = torch.where(there[:, None], residual(p, r), p)
    return torch.where(hit, slot, -1), left


def choice_weights(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:  # (B, V) x2
    """Tokens in the order of falling p/q, and the chance that each is preferred to later ones.

    r(i) = q(i)^2 + 2 q(i) (sum over j < i of q(j) (1 - c(j)) + c(i) sum over j > i of q(j)); c(i)
    in [0, 1] is what brings r(i) nearest to p(i), given the earlier ones.
    """
    tiny = torch.finfo(p.dtype).tiny
    order = (p / q.clamp_min(tiny)).argsort(dim=-1, descending=True, stable=True)
    p, q = p.gather(1, order), q.gather(1, order)
    later = (1 - q.cumsum(-1)).clamp_min(0)
    weight = torch.ones_like(p)
    for _ in range(ITERATIONS):
        spared = q * (1 - weight)
        before = spared.cumsum(-1) - spared
        weight = ((p / q.clamp_min(tiny) - q) / 2 - before) / later.clamp_min(tiny)
        weight = weight.clamp(0, 1)
    return order, weight


def choice_law(q: Tensor, weight: Tensor) -> Tensor:  # (B, V) x2 in that order -> (B, V)
    """The distribution of the chosen token."""
    spared = q * (1 - weight)
    before, later = spared.cumsum(-1) - spared, (1 - q.cumsum(-1)).clamp_min(0)
    return q * (q + 2 * (before + weight * later))
