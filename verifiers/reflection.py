"""Reflection coupling: a drafted state that the target would not make is mirrored, not redrawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.gaussian_ratio import density_ratio, redrawn
from mmspec.verifiers.gaussian_steps import (
    Steps,
    chain,
    dot,
    fit,
    one_deviation,
    own,
    pairs,
    plain,
    spread,
)

_MOST_TRIES = 100_000  # of a draw from a residual: 1 / TV(p, q) are expected


@dataclass(frozen=True)
class Reflection(Verifier):
    """Reflection-maximal coupling of a chain of Gaussian steps (De Bortoli et al. 2025), lossless.

    With x = mu_q + s z, D = (mu_q - mu_p) / s, r = |D| and e = D / r, a state is accepted with

        min(1, p(x) / q(x)) = min(1, exp(-(<z, D> + r^2 / 2))),

    and the first one refused becomes mu_p + s (z - 2 <z, e> e). Its distribution is the target's,
    and no coupling accepts more often than this, 2 Phi(-r / 2) = 1 - TV. Neither a new draw nor a
    new call is spent. After full acceptance comes the target's own state, as in plain decoding.

    Why rounds may share noise: what is decided about a state depends on its own noise alone, so
    that of the states behind the first refused one is still unused and may drive the next draft.
    It stays exact as long as nothing that was seen *in* those refused states is used again.

    A step whose two distributions differ in their standard deviations, as a network's that predicts
    its own, cannot be reflected. It is accepted by the same rule, with full densities, and refused
    it is drawn anew from norm((p - q)+) (`GaussianRatio`), which is maximal too. Which of the two
    serves a state is known before its noise is looked at, so chains may have steps of both kinds.

    Raises ValueError for trees, for states without their `Driving`, and for steps without noise.
    """

    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.IID)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return plain(draft, scores, noise)
        p, q, driving = pairs(self, draft, scores)
        alike = one_deviation(p, q)
        step = Steps(p, q, spread(p), driving)
        accepted = acceptance(step)
        if not bool((alike | ~draft.mask).all()):
            ratio = density_ratio(p, q, driving, draft.mask)
            accepted = torch.where(alike, accepted, ratio)
        hits = noise.flip(accepted, Lane.ACCEPT) & draft.mask
        length = hits.cumprod(-1).sum(-1)
        node = length.clamp_max(draft.nodes - 1)
        moved = mirror(step.at(node))
        rows = torch.arange(draft.batch, device=length.device)
        is_whole = length == draft.mask.sum(-1)
        other = (~alike[rows, node] & ~is_whole).nonzero().squeeze(1)
        drawn = redrawn(p, q, node, other, noise, _MOST_TRIES)
        moved = moved.index_copy(0, other, drawn.to(moved))
        full = fit(is_whole, moved) > 0
        return chain(draft, length, torch.where(full, own(scores, length, noise), moved))


def acceptance(step: Steps) -> Tensor:  # (B, N) float64
    """min(1, p / q) of every state; 1 where the distributions are equal."""
    away, events = step.away, step.p.events
    exponent = dot(step.noise, away, events) + dot(away, away, events) / 2
    return (-exponent).clamp_max(0).exp()


def mirror(step: Steps) -> Tensor:  # batch shape (B,) -> (B, *E)
    """The noise, reflected in the plane between the two means, put back at the target's mean."""
    away, events = step.away, step.p.events
    square = dot(away, away, events).clamp_min(torch.finfo(torch.float64).tiny)
    share = dot(step.noise, away, events) / square
    return step.p.mean + step.std * (step.noise - fit(2 * share, away) * away)
