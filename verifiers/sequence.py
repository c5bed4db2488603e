"""Sequence coupling: several drafted states for one step, tested one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.gaussian_steps import (
    GaussianSteps,
    align_steps,
    expand_event,
    line_excess,
    project_on_line,
    residual,
    sample_target,
    verify_empty,
)
from mmspec.verifiers.walk import find_longest_path


@dataclass(frozen=True)
class Sequence(Verifier):
    """Recursive rejection of Gaussian siblings in a tree (D-GRS, Bullo et al. 2026), lossless.

    Siblings are drawn independently from q = N(mu_q, s^2 I). On the line through both means, S is
    N(0, 1) under q and N(r, 1) under p, and rho(S) = exp(r (S - r / 2)). With lambda = 0 and G = 1
    before the first, each sibling in drafting order is accepted with min(1, (rho - lambda)+ / G);
    a rejection updates

        lambda <- lambda + G,   G <- the mass of (p - lambda q)+,

    and after the last S is sampled from norm((p - lambda q)+), with the first sibling's component
    orthogonal to the line. One sibling is accepted as often as by `Reflection`; several with
    probability 1 - G. Acceptance depends only on the coordinate S of a sibling, so rejections are
    independent of the orthogonal components and of the noise of the states below.

    Siblings must not share their noise (in a RACE draft the first has that of the position).
    Raises ValueError for states without their `DrivingNoise` and where target and draft differ in
    their standard deviation.
    """

    lossless: ClassVar[bool] = True
    decodes: ClassVar[tuple[str, ...]] = ("latents", "patches")
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.IID)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return verify_empty(draft, scores, noise)
        step = align_steps(self, draft, scores, trees=True)
        family = StateSiblings.from_draft(draft, step)
        chance, failed = sibling_acceptance(family)
        hits = noise.flip(chance, Lane.ACCEPT) & family.real  # (B, N + 1, C)
        slot = hits.int().argmax(-1, keepdim=True)
        chosen = torch.where(hits.any(-1), family.node.gather(-1, slot).squeeze(-1), -1)
        index = torch.arange(draft.nodes, device=chosen.device)
        path, length, row = find_longest_path(draft, chosen.gather(1, draft.parents + 1) == index)
        rows = torch.arange(draft.batch, device=row.device)
        first = family.node[rows, row, family.real[rows, row].int().argmax(-1)]
        uniform = noise.fresh_keys(Lane.RESIDUAL, torch.zeros_like(row[:1])).uniform()[:, 0]
        left = residual(step.at(first), 1 / failed[rows, row].clamp_min(1), uniform)
        leaf = ~family.real[rows, row].any(-1)
        following = torch.where(
            expand_event(leaf, left) > 0, sample_target(scores, row, noise), left
        )
        return Verdict(path, length, following)


@dataclass(frozen=True)
class StateSiblings:
    """The siblings below the context (entry 0) and below every node, with their coordinates."""

    node: Tensor  # (B, N + 1, C) index of the node, 0 where there is none
    real: Tensor  # (B, N + 1, C) bool
    coordinate: Tensor  # (B, N + 1, C) S
    r: Tensor  # (B, N + 1), 0 where there are no siblings

    @classmethod
    def from_draft(cls, draft: Draft, step: GaussianSteps) -> StateSiblings:
        table = draft.children()
        node, below = table.clamp_min(0), table.flatten(1).clamp_min(0)
        real = (table >= 0) & draft.mask.gather(1, below).view_as(table)
        r, coordinate = project_on_line(step)
        r, coordinate = (value.gather(1, below).view_as(table) for value in (r, coordinate))
        return cls(node, real, coordinate, torch.where(real, r, 0).amax(-1))


def sibling_acceptance(family: StateSiblings) -> tuple[Tensor, Tensor]:  # (B, N + 1, C), (B, N + 1)
    """Acceptance of every sibling after those before it failed, and lambda after all failed."""
    taken, mass = torch.zeros_like(family.r), torch.ones_like(family.r)  # lambda, G
    chances = []
    for real, coordinate in zip(family.real.unbind(-1), family.coordinate.unbind(-1), strict=True):
        gain = ((family.r * (coordinate - family.r / 2)).exp() - taken).clamp_min(0)
        chances.append(torch.where(mass > 0, gain / mass, 1).clamp_max(1))
        taken = torch.where(real, taken + mass, taken)
        share = 1 / taken.clamp_min(1)  # at least 1 after the first
        left = line_excess(family.r, share) / share
        mass = torch.where(real, torch.minimum(left, mass), mass)
    return torch.stack(chances, -1), taken
