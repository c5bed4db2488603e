"""What verifiers of Gaussian steps share: the two distributions of every drafted state, side by side.

With one standard deviation s the two distributions differ along a line only. In units of s,

    x = mu_q + s z,   D = (mu_q - mu_p) / s,   r = |D|,   S = <z, -D> / r,

S is N(0, 1) under the draft and N(r, 1) under the target; what is orthogonal to D is standard
normal under both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.distributions.distribution import Distribution
from mmspec.distributions.gaussian import Driving, Gaussian
from mmspec.distributions.noise import Keys, Noise
from mmspec.draft import Draft, Scores, Verdict, Verifier
from mmspec.verifiers import gaussian_line
from mmspec.verifiers.walk import check

ROUNDING = 1e-5  # relative difference of two standard deviations that are meant to be the same
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Steps:
    """The distributions that led to every node of a draft, and the noise it was made with."""

    p: Gaussian  # (B, N) of the target, at the parent of the node
    q: Gaussian  # (B, N) of the draft
    std: Tensor  # (B, N, 1 ..) or (B, N, *E), of both
    noise: Tensor  # (B, N, *E), standard normal

    @property
    def away(self) -> Tensor:  # (B, N, *E)
        """D, the draft's mean seen from the target's, in standard deviations."""
        return (self.q.mean - self.p.mean) / self.std

    def at(self, node: Tensor) -> Steps:  # (B,) -> batch shape (B,)
        """One node per row."""
        rows = torch.arange(len(node), device=node.device)
        p, q = self.p[rows, node], self.q[rows, node]
        return Steps(p, q, self.std[rows, node], self.noise[rows, node])


def steps(verifier: Verifier, draft: Draft, scores: Scores, *, trees: bool = False) -> Steps:
    """Line up the distributions of a draft.

    Raises ValueError for kinds that the verifier would get wrong, for trees where it takes chains,
    for a missing `Driving`, and where the two standard deviations differ or are 0.
    """
    p, q, noise = pairs(verifier, draft, scores, trees=trees)
    if bool((~one_deviation(p, q) & draft.mask).any()):
        raise ValueError(
            f"{type(verifier).__name__} couples steps of one positive standard deviation, but "
            "target and draft have different ones, or 0; draft with the target's kernel, use "
            "Reflection on a chain, or a sampler that draws noise"
        )
    return Steps(p, q, spread(p), noise)


def one_deviation(p: Gaussian, q: Gaussian) -> Tensor:  # distributions (B, N) -> (B, N) bool
    """Where both distributions have the same positive standard deviation, number by number."""
    std, other = spread(p), spread(q)
    same = ((std - other).abs() <= ROUNDING * std) & (std > 0)
    return same.flatten(2).all(-1)


def pairs(
    verifier: Verifier, draft: Draft, scores: Scores, *, trees: bool = False
) -> tuple[Gaussian, Gaussian, Tensor]:  # (B, N), (B, N), (B, N, *E)
    """The distributions of the target and of the draft at every node, and its noise; errors as above."""
    check(verifier, draft, trees=trees)
    if not isinstance(draft.extras, Driving):
        raise ValueError(
            f"{type(verifier).__name__} needs the noise that the states were made with (recovering "
            "it from rounded states is biased); set Draft.extras to a Driving"
        )
    driving = draft.extras.noise
    distribution, q = gaussian(scores.distribution), gaussian(draft.distribution)
    if draft.is_chain:
        return distribution[:, :-1], q, driving
    rows = torch.arange(draft.batch, device=draft.parents.device)[:, None]
    return distribution[rows, draft.parents + 1], q, driving


def line(step: Steps) -> tuple[Tensor, Tensor]:  # (...) x2 float64
    """r and S."""
    away, events = step.away, step.p.events
    r = dot(away, away, events).sqrt()
    return r, -dot(step.noise, away, events) / r.clamp_min(_TINY)


def residual(step: Steps, w: Tensor, uniform: Tensor) -> Tensor:  # (B,) x2 -> (B, *E)
    """A draw from norm((w p - q)+), w <= 1: a new S, the same noise across the line."""
    r, place = line(step)
    away = step.away
    shift = gaussian_line.draw(r, w, uniform) - r - place  # p's mean is at r
    return step.p.mean + step.std * (step.noise - fit(shift / r.clamp_min(_TINY), away) * away)


def gaussian(distribution: Distribution | None) -> Gaussian:
    """Narrow a distribution to a Gaussian one."""
    if not isinstance(distribution, Gaussian):
        raise TypeError(
            f"a Gaussian distribution is needed here, but the distribution is {type(distribution).__name__}"
        )
    return distribution


def spread(distribution: Gaussian) -> Tensor:  # distribution (B, N) -> (B, N, 1 ..) or (B, N, *E)
    """The standard deviations, with no more entries than they need."""
    std = distribution.std.reshape(
        *(1,) * (distribution.mean.dim() - distribution.std.dim()), *distribution.std.shape
    )
    for axis in range(-distribution.events, 0):
        if std.stride(axis) == 0:  # one number, expanded
            std = std.narrow(axis, 0, 1)
    return std.expand(*distribution.batch, *std.shape[len(distribution.batch) :])


def dot(left: Tensor, right: Tensor, events: int) -> Tensor:  # (..., *E) x2 -> (...) float64
    """Inner product over the event, added up in float64."""
    product = left * right
    return product.sum(tuple(range(-events, 0)), dtype=torch.float64)


def fit(value: Tensor, like: Tensor) -> Tensor:  # (...), (..., *E) -> (..., 1 ..)
    """Numbers per place, shaped and typed to be multiplied with events."""
    return value.to(like.dtype).reshape(*value.shape, *(1,) * (like.dim() - value.dim()))


def own(scores: Scores, row: Tensor, noise: Noise) -> Tensor:  # (B,) -> (B, *E)
    """The target's own next state at `row`, as plain decoding draws it."""
    index = torch.arange(len(row), device=row.device), row
    keys = noise.shared(scores.position[index][:, None])
    return gaussian(scores.distribution)[index].sample(Keys(keys.key[:, 0]))


def plain(draft: Draft, scores: Scores, noise: Noise) -> Verdict:
    """The verdict on an empty draft: the target's own next state."""
    none = torch.zeros(draft.batch, dtype=torch.int64, device=draft.tokens.device)
    return chain(draft, none, own(scores, none, noise))


def chain(draft: Draft, length: Tensor, following: Tensor) -> Verdict:  # (B,), (B, *E)
    """The verdict that keeps `length` states of a chain and goes on with `following`."""
    index = torch.arange(draft.nodes, device=length.device)
    return Verdict(torch.where(index < length[:, None], index, -1), length, following)
