"""Reflection coupling: a rejected state is mirrored instead of sampled again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.gaussian_ratio import density_ratio, draw_residual
from mmspec.verifiers.gaussian_steps import (
    GaussianSteps,
    accept_chain,
    compact_std,
    dot,
    expand_event,
    has_equal_std,
    pair_distributions,
    sample_target,
    verify_empty,
)

_MAX_TRIALS = 100_000  # per sample of a residual; 1 / TV(p, q) are expected


@dataclass(frozen=True)
class Reflection(Verifier):
    """Reflection-maximal coupling of a chain of Gaussian steps (De Bortoli et al. 2025), lossless.

    With x = mu_q + s z, D = (mu_q - mu_p) / s, r = |D| and e = D / r, a state is accepted with

        min(1, p(x) / q(x)) = min(1, exp(-(<z, D> + r^2 / 2))),

    and the first rejected state becomes mu_p + s (z - 2 <z, e> e). Its distribution is the
    target's, and no coupling accepts more often: 2 Phi(-r / 2) = 1 - TV. It takes no further sample
    and no further call. After full acceptance comes the target's state, as in plain decoding.

    Rounds may share noise: the decision on a state depends on its own noise alone, so the noise of
    states after the first rejected one is unused and may be used for the next draft. This is exact
    as long as no prediction from those rejected states is used again.

    A step whose two standard deviations differ, such as those predicted by a network, cannot be
    reflected. It is accepted with full densities and, when rejected, sampled again from norm((p -
    q)+) (`GaussianRatio`), which is also maximal. The choice between the two does not depend on the
    noise of the state, so chains may have steps of both kinds.

    Raises ValueError for trees, for states without their `DrivingNoise`, and for steps without
    noise.
    """

    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    decodes: ClassVar[tuple[str, ...]] = ("latents", "patches")
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.IID)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return verify_empty(draft, scores, noise)
        p, q, driving = pair_distributions(self, draft, scores)
        is_equal = has_equal_std(p, q)
        step = GaussianSteps(p, q, compact_std(p), driving)
        accepted = acceptance(step)
        if not bool((is_equal | ~draft.mask).all()):
            ratio = density_ratio(p, q, driving, draft.mask)
            accepted = torch.where(is_equal, accepted, ratio)
        hits = noise.flip(accepted, Lane.ACCEPT) & draft.mask
        length = hits.cumprod(-1).sum(-1)
        node = length.clamp_max(draft.nodes - 1)
        moved = mirror(step.at(node))
        rows = torch.arange(draft.batch, device=length.device)
        is_whole = length == draft.mask.sum(-1)
        other = (~is_equal[rows, node] & ~is_whole).nonzero().squeeze(1)
        drawn = draw_residual(p, q, node, other, noise, _MAX_TRIALS)
        moved = moved.index_copy(0, other, drawn.to(moved))
        full = expand_event(is_whole, moved) > 0
        return accept_chain(
            draft, length, torch.where(full, sample_target(scores, length, noise), moved)
        )


def acceptance(step: GaussianSteps) -> Tensor:  # (B, N) float64
    """min(1, p / q) of every state; 1 where the distributions are equal."""
    mean_shift, events = step.mean_shift, step.p.events
    exponent = dot(step.noise, mean_shift, events) + dot(mean_shift, mean_shift, events) / 2
    return (-exponent).clamp_max(0).exp()


def mirror(step: GaussianSteps) -> Tensor:  # batch shape (B,) -> (B, *E)
    """Reflect the noise in the plane between the two means and add it to the target's mean."""
    mean_shift, events = step.mean_shift, step.p.events
    square = dot(mean_shift, mean_shift, events).clamp_min(torch.finfo(torch.float64).tiny)
    share = dot(step.noise, mean_shift, events) / square
    return step.p.mean + step.std * (step.noise - expand_event(2 * share, mean_shift) * mean_shift)
