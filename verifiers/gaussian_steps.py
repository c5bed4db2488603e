"""Gaussian steps: the target and draft distributions of drafted states, and their difference.

With one standard deviation s the two distributions differ along a line only. In units of s,

    x = mu_q + s z,   D = (mu_q - mu_p) / s,   r = |D|,   S = <z, -D> / r,

S is N(0, 1) under the draft and N(r, 1) under the target; the component orthogonal to D is standard
normal under both. With phi the standard normal density and 0 <= w <= 1, the part of w phi(s - r)
above phi(s) lies right of one crossing c:

    w phi(s - r) > phi(s)   <=>   s > c = r / 2 - ln(w) / r

    excess = integral of (w phi(s - r) - phi(s))+ = w T(c - r) - T(c),   T(x) = 1 - Phi(x)

These closed forms are float64 and broadcast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.distributions import Distribution
from mmspec.distributions.gaussian import DrivingNoise, Gaussian
from mmspec.distributions.noise import Keys, Noise
from mmspec.draft import Draft, Scores, Verdict, Verifier
from mmspec.verifiers.walk import check_draft

ROUNDING = 1e-5  # relative tolerance for equal standard deviations
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class GaussianSteps:
    """The distributions at every node of a draft, and the noise of its state."""

    p: Gaussian  # (B, N) of the target, at the parent of the node
    q: Gaussian  # (B, N) of the draft
    std: Tensor  # (B, N, 1 ..) or (B, N, *E), of both
    noise: Tensor  # (B, N, *E), standard normal

    @property
    def mean_shift(self) -> Tensor:  # (B, N, *E)
        """D, the draft mean relative to the target mean, in standard deviations."""
        return (self.q.mean - self.p.mean) / self.std

    def at(self, node: Tensor) -> GaussianSteps:  # (B,) -> batch shape (B,)
        """Select one node per row."""
        rows = torch.arange(len(node), device=node.device)
        p, q = self.p[rows, node], self.q[rows, node]
        return GaussianSteps(p, q, self.std[rows, node], self.noise[rows, node])


def align_steps(
    verifier: Verifier, draft: Draft, scores: Scores, *, trees: bool = False
) -> GaussianSteps:
    """Pair the distributions of a draft whose steps have one standard deviation.

    Raises ValueError for kinds that the verifier does not support, for trees where it takes chains,
    for a missing `DrivingNoise`, and where the two standard deviations differ or are 0.
    """
    p, q, noise = pair_distributions(verifier, draft, scores, trees=trees)
    if bool((~has_equal_std(p, q) & draft.mask).any()):
        raise ValueError(
            f"{type(verifier).__name__} couples steps of one positive standard deviation, but "
            "target and draft have different ones, or 0; draft with the target's kernel, use "
            "Reflection on a chain, or a sampler that draws noise"
        )
    return GaussianSteps(p, q, compact_std(p), noise)


def has_equal_std(p: Gaussian, q: Gaussian) -> Tensor:  # distributions (B, N) -> (B, N) bool
    """Where both distributions have the same positive standard deviation in every entry."""
    std, other = compact_std(p), compact_std(q)
    same = ((std - other).abs() <= ROUNDING * std) & (std > 0)
    return same.flatten(2).all(-1)


def pair_distributions(
    verifier: Verifier, draft: Draft, scores: Scores, *, trees: bool = False
) -> tuple[Gaussian, Gaussian, Tensor]:  # (B, N), (B, N), (B, N, *E)
    """The distributions of target and draft at every node, and its noise; errors as above."""
    check_draft(verifier, draft, trees=trees)
    if not isinstance(draft.extras, DrivingNoise):
        raise ValueError(
            f"{type(verifier).__name__} needs the noise that the states were made with (recovering "
            "it from rounded states is biased); set Draft.extras to a DrivingNoise"
        )
    driving = draft.extras.noise
    distribution, q = as_gaussian(scores.distribution), as_gaussian(draft.distribution)
    if draft.is_chain:
        return distribution[:, :-1], q, driving
    rows = torch.arange(draft.batch, device=draft.parents.device)[:, None]
    return distribution[rows, draft.parents + 1], q, driving


def project_on_line(step: GaussianSteps) -> tuple[Tensor, Tensor]:  # (...) x2 float64
    """r and S."""
    mean_shift, events = step.mean_shift, step.p.events
    r = dot(mean_shift, mean_shift, events).sqrt()
    return r, -dot(step.noise, mean_shift, events) / r.clamp_min(_TINY)


def residual(step: GaussianSteps, w: Tensor, uniform: Tensor) -> Tensor:  # (B,) x2 -> (B, *E)
    """Sample norm((p - q)+) with weight w <= 1 on p: a new S, the same orthogonal noise."""
    r, coordinate = project_on_line(step)
    mean_shift = step.mean_shift
    shift = draw_on_line(r, w, uniform) - r - coordinate  # p's mean is at r
    return step.p.mean + step.std * (
        step.noise - expand_event(shift / r.clamp_min(_TINY), mean_shift) * mean_shift
    )


def as_gaussian(distribution: Distribution | None) -> Gaussian:
    """Narrow a distribution to a Gaussian one. Raises TypeError for others."""
    if not isinstance(distribution, Gaussian):
        raise TypeError(
            f"a Gaussian is needed here, but the distribution is a {type(distribution).__name__}"
        )
    return distribution


def compact_std(
    distribution: Gaussian,
) -> Tensor:  # distribution (B, N) -> (B, N, 1 ..) or (B, N, *E)
    """The standard deviations, with no more entries than needed."""
    std = distribution.std.reshape(
        *(1,) * (distribution.mean.dim() - distribution.std.dim()), *distribution.std.shape
    )
    for axis in range(-distribution.events, 0):
        if std.stride(axis) == 0:  # one number, expanded
            std = std.narrow(axis, 0, 1)
    return std.expand(*distribution.batch, *std.shape[len(distribution.batch) :])


def dot(left: Tensor, right: Tensor, events: int) -> Tensor:  # (..., *E) x2 -> (...) float64
    """Inner product over the event, accumulated in float64."""
    product = left * right
    return product.sum(tuple(range(-events, 0)), dtype=torch.float64)


def expand_event(value: Tensor, like: Tensor) -> Tensor:  # (...), (..., *E) -> (..., 1 ..)
    """Reshape and cast values per state so that they broadcast against events."""
    return value.to(like.dtype).reshape(*value.shape, *(1,) * (like.dim() - value.dim()))


def sample_target(scores: Scores, row: Tensor, noise: Noise) -> Tensor:  # (B,) -> (B, *E)
    """Sample the target's next state at `row`, as plain decoding does."""
    index = torch.arange(len(row), device=row.device), row
    keys = noise.shared_keys(scores.position[index][:, None])
    return as_gaussian(scores.distribution)[index].sample(Keys(keys.key[:, 0]))


def verify_empty(draft: Draft, scores: Scores, noise: Noise) -> Verdict:
    """The verdict on an empty draft: the target's next state."""
    none = torch.zeros(draft.batch, dtype=torch.int64, device=draft.tokens.device)
    return accept_chain(draft, none, sample_target(scores, none, noise))


def accept_chain(draft: Draft, length: Tensor, following: Tensor) -> Verdict:  # (B,), (B, *E)
    """The verdict that accepts `length` states of a chain and continues with `following`."""
    index = torch.arange(draft.nodes, device=length.device)
    return Verdict(torch.where(index < length[:, None], index, -1), length, following)


_MIN_R = 1e-30  # used for r = 0, where the crossing is at infinity (w < 1) or p = q
_REACH = 10.0  # less than 1e-22 of the excess lies further from the crossing
_HALVINGS = 64


def line_excess(r: Tensor, w: Tensor) -> Tensor:
    """The mass of (w phi(s - r) - phi(s))+; 1 - 2 Phi(-r / 2) for w = 1."""
    return _mass_right_of(_crossing(r, w), r, w)


def draw_on_line(r: Tensor, w: Tensor, uniform: Tensor) -> Tensor:
    """Sample s in proportion to (w phi(s - r) - phi(s))+; decreasing in `uniform` (0, 1).

    By bisection of the closed form of its tail: no network call and no trials.
    """
    low = _crossing(r, w)
    remaining = uniform * _mass_right_of(low, r, w)
    high = torch.maximum(low, r) + _REACH
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = _mass_right_of(middle, r, w) > remaining
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def _crossing(r: Tensor, w: Tensor) -> Tensor:
    return r / 2 - w.log() / r.clamp_min(_MIN_R)


def _mass_right_of(s: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return (w * _tail(s - r) - _tail(s)).clamp_min(0)


def _tail(x: Tensor) -> Tensor:
    return torch.erfc(x * math.sqrt(0.5)) / 2
