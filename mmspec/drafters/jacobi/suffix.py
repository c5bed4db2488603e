"""What becomes of a Jacobi window behind the first rejection: one policy per object.

The tokens there were scored behind a token that was rejected, so their new distributions p differ
from the distributions q they were drawn from. A policy returns the next tokens and the
distributions to store with them. The distribution stored with a token must be the one it was drawn
from *given the tokens before it*; for tokens that are kept by coupling that is p, not the old q.

Letters: B batch rows, M window slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, quantile, residual
from mmspec.distributions.noise import Lane, Noise

KEEP, REDRAW = Lane.OTHER, Lane.OTHER + 1  # lanes of the draws made here


@dataclass(frozen=True)
class Slots:
    """Window slots to redraw."""

    p: Categorical  # (B, M) their distributions in the pass that has just been made
    q: Categorical  # (B, M) what their tokens were drawn from
    tokens: Tensor  # (B, M) int64
    known: Tensor  # (B, M) bool, False = no token stood there yet
    position: Tensor  # (B, M) absolute

    def ratio(self) -> Tensor:  # (B, M)
        """p/q at the tokens."""
        at = self.tokens[..., None]
        p, q = self.p.probs.gather(-1, at), self.q.probs.gather(-1, at)
        return (p / q.clamp_min(torch.finfo(q.dtype).tiny)).squeeze(-1)

    def again(self, noise: Noise) -> Tensor:  # (B, M)
        """Tokens drawn from p, whatever stood there."""
        return quantile(self.p.probs, noise.fresh(REDRAW, self.position).uniform(1)).squeeze(-1)


class Suffix(Protocol):
    """How a slot behind the first rejection is redrawn.

    `records_distribution` says whether the distribution that goes with a token is the one it was
    drawn from, so that an exact verifier stays exact. With `carries` a kept token is correlated
    with the one before, so the verifier must decide about a position without having looked at later
    ones.
    """

    @property
    def records_distribution(self) -> bool: ...
    @property
    def carries(self) -> bool: ...

    def redraw(self, slots: Slots, noise: Noise) -> tuple[Tensor, Categorical]: ...


@dataclass(frozen=True)
class Resample:
    """x ~ p, q := p (SJD, Teng et al. 2025). Exact; consecutive windows share little."""

    records_distribution: ClassVar[bool] = True
    carries: ClassVar[bool] = False

    def redraw(self, slots: Slots, noise: Noise) -> tuple[Tensor, Categorical]:
        return slots.again(noise), slots.p


@dataclass(frozen=True)
class CoupleMax:
    """Keep x with min(1, p/q), else draw from norm((p - q)+); q := p (MC-SJD, So et al. 2026).

    The maximal coupling: a slot keeps its token with probability 1 - TV(p, q). Exact, because the
    new token is distributed as p. The adaptive continuation of SJD-PAC is the same draw.
    """

    records_distribution: ClassVar[bool] = True
    carries: ClassVar[bool] = True

    def redraw(self, slots: Slots, noise: Noise) -> tuple[Tensor, Categorical]:
        kept = (noise.fresh(KEEP, slots.position).uniform() < slots.ratio()) & slots.known
        p, q = slots.p.probs, slots.q.probs
        left = torch.where(slots.known[..., None], residual(p, q), p)
        other = quantile(left, noise.fresh(REDRAW, slots.position).uniform(1)).squeeze(-1)
        return torch.where(kept, slots.tokens, other), slots.p


@dataclass(frozen=True)
class CoupleGumbel:
    """x = argmax(log p + g) with g fixed per absolute position; q := p (MC-SJD, Gumbel sharing).

    A slot keeps its token with probability at least (1 - TV) / (1 + TV), between any two rounds.
    Exact with the rejection verifiers, whose own draws do not use g. With `Coupled`, which draws
    the target's token with the same g, it is Jacobi iteration towards plain decoding's very
    sample.
    """

    records_distribution: ClassVar[bool] = True
    carries: ClassVar[bool] = True

    def redraw(self, slots: Slots, noise: Noise) -> tuple[Tensor, Categorical]:
        return slots.p.sample(noise.shared(slots.position)), slots.p


@dataclass(frozen=True)
class ThresholdReuse:
    """Keep x where p/q > tau, else x ~ p; q := p in both cases (SJD++, Teng et al. 2025).

    Reconstructed; the paper's own confidence score was not seen. Lossy: a kept token was not drawn
    from p. `tau=inf` is `Resample`, `tau=0` keeps all.
    """

    tau: float = 1.0
    records_distribution: ClassVar[bool] = False
    carries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.tau)

    def redraw(self, slots: Slots, noise: Noise) -> tuple[Tensor, Categorical]:
        return _reused(slots, self.tau, noise)[0], slots.p


@dataclass(frozen=True)
class OneHotReuse:
    """The tokens of `ThresholdReuse`, a kept one stored with a point mass as its distribution.

    Exact, whatever is kept; a kept token is then accepted with p(x) instead of p/q, and since its
    point mass bounds p/q by 1, tau >= 1 keeps it for one round only.
    """

    tau: float = 1.0
    records_distribution: ClassVar[bool] = True
    carries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.tau)

    def redraw(self, slots: Slots, noise: Noise) -> tuple[Tensor, Categorical]:
        tokens, kept = _reused(slots, self.tau, noise)
        point = one_hot(tokens, slots.p.scores)
        scores = torch.where(kept[..., None], point, slots.p.scores)
        return tokens, Categorical(scores, slots.p.hard)


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:  # (...), (..., V) -> (..., V)
    """Scores of a point mass on every token, as the scores `like`."""
    scores = like.new_full((*tokens.shape, like.shape[-1]), -torch.inf)
    return scores.scatter_(-1, tokens[..., None], 0)


def _reused(slots: Slots, tau: float, noise: Noise) -> tuple[Tensor, Tensor]:  # (B, M) x2
    kept = (slots.ratio() > tau) & slots.known
    return torch.where(kept, slots.tokens, slots.again(noise)), kept


def _check(tau: float) -> None:
    if not tau >= 0:
        raise ValueError(
            f"tau={tau} is no bound on p/q; give 0 (keep all) or more, inf = keep none"
        )


REUSE: Mapping[str, Callable[[float], Suffix]] = {
    "one-hot": OneHotReuse,
    "published": ThresholdReuse,
}
