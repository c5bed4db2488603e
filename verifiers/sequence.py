"""Sequence coupling: several drafted states for one step, tried one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers import gaussian_line
from mmspec.verifiers.gaussian_steps import Steps, fit, line, own, plain, residual, steps
from mmspec.verifiers.walk import longest


@dataclass(frozen=True)
class Sequence(Verifier):
    """Recursive rejection of Gaussian siblings down a tree (D-GRS, Bullo et al. 2026), lossless.

    Siblings are drawn independently from q = N(mu_q, s^2 I). On the line through both means, S is
    N(0, 1) under q and N(r, 1) under p, and rho(S) = exp(r (S - r / 2)). With lambda = 0 and G = 1
    before the first, each sibling in drafting order is accepted with min(1, (rho - lambda)+ / G);
    a refused one leaves

        lambda <- lambda + G,   G <- the mass of (p - lambda q)+,

    and after the last S is drawn from norm((p - lambda q)+), with the first sibling's part
    orthogonal to the line. One sibling is accepted as often as by `Reflection`; more are accepted
    more often: 1 - G. Only the coordinate S of a sibling decides about it, so refused siblings say
    nothing about any orthogonal part, nor about the noise of the states below them.

    No two siblings may share their noise (in a RACE draft the first has that of the position).
    Raises ValueError for states without their `Driving` and where target and draft differ in their
    standard deviation.
    """

    lossless: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.IID)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return plain(draft, scores, noise)
        step = steps(self, draft, scores, trees=True)
        family = StateSiblings.of(draft, step)
        chance, failed = odds(family)
        hits = noise.flip(chance, Lane.ACCEPT) & family.real  # (B, N + 1, C)
        slot = hits.int().argmax(-1, keepdim=True)
        chosen = torch.where(hits.any(-1), family.node.gather(-1, slot).squeeze(-1), -1)
        index = torch.arange(draft.nodes, device=chosen.device)
        path, length, row = longest(draft, chosen.gather(1, draft.parents + 1) == index)
        rows = torch.arange(draft.batch, device=row.device)
        first = family.node[rows, row, family.real[rows, row].int().argmax(-1)]
        uniform = noise.fresh(Lane.RESIDUAL, torch.zeros_like(row[:1])).uniform()[:, 0]
        left = residual(step.at(first), 1 / failed[rows, row].clamp_min(1), uniform)
        leaf = ~family.real[rows, row].any(-1)
        following = torch.where(fit(leaf, left) > 0, own(scores, row, noise), left)
        return Verdict(path, length, following)


@dataclass(frozen=True)
class StateSiblings:
    """The siblings below the context (entry 0) and below every node, on their line."""

    node: Tensor  # (B, N + 1, C) index of the node, 0 where there is none
    real: Tensor  # (B, N + 1, C) bool
    place: Tensor  # (B, N + 1, C) S
    r: Tensor  # (B, N + 1), 0 where there are no siblings

    @classmethod
    def of(cls, draft: Draft, step: Steps) -> StateSiblings:
        table = draft.children()
        node, below = table.clamp_min(0), table.flatten(1).clamp_min(0)
        real = (table >= 0) & draft.mask.gather(1, below).view_as(table)
        r, place = line(step)
        r, place = (value.gather(1, below).view_as(table) for value in (r, place))
        return cls(node, real, place, torch.where(real, r, 0).amax(-1))


def odds(family: StateSiblings) -> tuple[Tensor, Tensor]:  # (B, N + 1, C), (B, N + 1)
    """The chance of every sibling once those before it failed, and lambda when all have."""
    taken, mass = torch.zeros_like(family.r), torch.ones_like(family.r)  # lambda, G
    chances = []
    for real, place in zip(family.real.unbind(-1), family.place.unbind(-1), strict=True):
        gain = ((family.r * (place - family.r / 2)).exp() - taken).clamp_min(0)
        chances.append(torch.where(mass > 0, gain / mass, 1).clamp_max(1))
        taken = torch.where(real, taken + mass, taken)
        share = 1 / taken.clamp_min(1)  # at least 1 after the first
        left = gaussian_line.excess(family.r, share) / share
        mass = torch.where(real, torch.minimum(left, mass), mass)
    return torch.stack(chances, -1), taken
