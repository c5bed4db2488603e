"""Policies for the tokens of a Jacobi window after the first rejection, one per class.

These tokens were scored after a token that was rejected, so their new distributions p differ from
the distributions q they were drawn from. A policy returns the next tokens and the distributions to
store with them. The distribution stored with a token must be the one it was drawn from *given the
tokens before it*; for tokens kept by coupling that is p, not the old q.

Letters: B batch rows, M window slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, residual
from mmspec.distributions.noise import Lane, Noise, quantile

KEEP, REDRAW = Lane.OTHER, Lane.OTHER + 1  # noise lanes of these draws


@dataclass(frozen=True)
class WindowSlots:
    """Window slots to redraw."""

    p: Categorical  # (B, M) their distributions in the last pass
    q: Categorical  # (B, M) the distributions their tokens were drawn from
    tokens: Tensor  # (B, M) int64
    known: Tensor  # (B, M) bool, False = no token yet
    position: Tensor  # (B, M) absolute

    def ratio(self) -> Tensor:  # (B, M)
        """p/q at the tokens."""
        at = self.tokens[..., None]
        p, q = self.p.probs.gather(-1, at), self.q.probs.gather(-1, at)
        return (p / q.clamp_min(torch.finfo(q.dtype).tiny)).squeeze(-1)

    def resample(self, noise: Noise) -> Tensor:  # (B, M)
        """Tokens drawn from p, independent of the old ones."""
        return quantile(self.p.probs, noise.fresh_keys(REDRAW, self.position).uniform(1)).squeeze(
            -1
        )


class SuffixPolicy(Protocol):
    """How slots after the first rejection are redrawn.

    `records_distribution`: the stored distribution of a token is the one it was drawn from, so an
    exact verifier stays exact. `carries`: a kept token is correlated with the previous one, so the
    verifier must decide about a position independently of later ones.
    """

    @property
    def records_distribution(self) -> bool: ...
    @property
    def carries_tokens(self) -> bool: ...

    def redraw(self, slots: WindowSlots, noise: Noise) -> tuple[Tensor, Categorical]: ...


@dataclass(frozen=True)
class Resample:
    """x ~ p, q := p (SJD, Teng et al. 2025). Exact; consecutive windows have little in common."""

    records_distribution: ClassVar[bool] = True
    carries_tokens: ClassVar[bool] = False

    def redraw(self, slots: WindowSlots, noise: Noise) -> tuple[Tensor, Categorical]:
        return slots.resample(noise), slots.p


@dataclass(frozen=True)
class CoupleMax:
    """Keep x with min(1, p/q), else draw from norm((p - q)+); q := p (MC-SJD, So et al. 2026).

    The maximal coupling: a slot keeps its token with probability 1 - TV(p, q). Exact, because the
    new token is distributed as p. The adaptive continuation of SJD-PAC is the same draw.
    """

    records_distribution: ClassVar[bool] = True
    carries_tokens: ClassVar[bool] = True

    def redraw(self, slots: WindowSlots, noise: Noise) -> tuple[Tensor, Categorical]:
        is_kept = (noise.fresh_keys(KEEP, slots.position).uniform() < slots.ratio()) & slots.known
        p, q = slots.p.probs, slots.q.probs
        residual_probs = torch.where(slots.known[..., None], residual(p, q), p)
        redrawn = quantile(
            residual_probs, noise.fresh_keys(REDRAW, slots.position).uniform(1)
        ).squeeze(-1)
        return torch.where(is_kept, slots.tokens, redrawn), slots.p


@dataclass(frozen=True)
class CoupleGumbel:
    """x = argmax(log p + g) with g fixed per absolute position; q := p (MC-SJD, Gumbel sharing).

    A slot keeps its token with probability at least (1 - TV) / (1 + TV), between any two rounds.
    Exact with the rejection verifiers, whose own draws do not use g. With `Coupled`, which draws
    the target's token with the same g, it is Jacobi iteration towards the sample of plain decoding.
    """

    records_distribution: ClassVar[bool] = True
    carries_tokens: ClassVar[bool] = True

    def redraw(self, slots: WindowSlots, noise: Noise) -> tuple[Tensor, Categorical]:
        return slots.p.sample(noise.shared_keys(slots.position)), slots.p


@dataclass(frozen=True)
class ThresholdReuse:
    """Keep x where p/q > tau, else x ~ p; q := p in both cases (SJD++, Teng et al. 2025).

    Reconstructed: the paper's confidence score was not available. Lossy: a kept token was not drawn
    from p. `tau=inf` is `Resample`, `tau=0` keeps all.
    """

    tau: float = 1.0
    records_distribution: ClassVar[bool] = False
    carries_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.tau)

    def redraw(self, slots: WindowSlots, noise: Noise) -> tuple[Tensor, Categorical]:
        return _reuse_tokens(slots, self.tau, noise)[0], slots.p


@dataclass(frozen=True)
class OneHotReuse:
    """The tokens of `ThresholdReuse`, with a point mass as the distribution of a kept token.

    Exact; a kept token is then accepted with p(x) instead of p/q, and since its point mass bounds
    p/q by 1, tau >= 1 keeps it for one round only.
    """

    tau: float = 1.0
    records_distribution: ClassVar[bool] = True
    carries_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.tau)

    def redraw(self, slots: WindowSlots, noise: Noise) -> tuple[Tensor, Categorical]:
        tokens, is_kept = _reuse_tokens(slots, self.tau, noise)
        point = one_hot(tokens, slots.p.scores)
        scores = torch.where(is_kept[..., None], point, slots.p.scores)
        return tokens, Categorical(scores, slots.p.hard)


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:  # (...), (..., V) -> (..., V)
    """Scores of a point mass on every token, with the type of `like`."""
    scores = like.new_full((*tokens.shape, like.shape[-1]), -torch.inf)
    return scores.scatter_(-1, tokens[..., None], 0)


def _reuse_tokens(
    slots: WindowSlots, tau: float, noise: Noise
) -> tuple[Tensor, Tensor]:  # (B, M) x2
    is_kept = (slots.ratio() > tau) & slots.known
    return torch.where(is_kept, slots.tokens, slots.resample(noise)), is_kept


def _check(tau: float) -> None:
    if not tau >= 0:
        raise ValueError(
            f"tau={tau} is not a bound on p/q; give 0 (keep all) or more, inf = keep none"
        )


REUSE: Mapping[str, Callable[[float], SuffixPolicy]] = {
    "one-hot": OneHotReuse,
    "published": ThresholdReuse,
}
