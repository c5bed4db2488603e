"""Distributions over a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions import Distribution
from mmspec.distributions.noise import Keys


@dataclass(frozen=True)
class Categorical:
    """A distribution over a vocabulary: scores, and their probabilities.

    `scores` are log-probabilities up to a constant per entry; -inf is impossible. With `hard` the
    distribution is a point mass on the highest score (greedy decoding); `scores` still rank the
    other tokens. Scores and probabilities are computed on first use. `known_probs` are returned bit
    for bit, also after indexing.
    """

    source: Tensor | Callable[[], Tensor]  # (..., V) float scores, or a function that returns them
    hard: bool = False
    known_probs: Tensor | None = None  # (..., V) probabilities, if already computed
    repeats: tuple[Categorical, tuple[int, ...]] | None = None  # see `repeat_rows`
    invalid_reason: ClassVar[str] = "logits are NaN or all -inf"

    @classmethod
    def from_weights(cls, weights: Tensor) -> Categorical:
        """From weights (..., V), which need not be normalised."""
        return cls(weights.log())

    @classmethod
    def from_probs(cls, probs: Tensor) -> Categorical:
        """From exact probabilities (..., V), which sum to 1."""
        return cls(probs.log, known_probs=probs)

    @cached_property
    def scores(self) -> Tensor:  # (..., V)
        """Log-probabilities up to a constant; with `hard` they only rank."""
        return self.source if isinstance(self.source, Tensor) else self.source()

    @property
    def batch(self) -> torch.Size:
        return (self.scores if self.known_probs is None else self.known_probs).shape[:-1]

    @property
    def size(self) -> int:
        return (self.scores if self.known_probs is None else self.known_probs).shape[-1]

    @cached_property
    def log_probs(self) -> Tensor:  # (..., V)
        """Normalised log-probabilities."""
        if self.hard:
            return self.probs.log()
        return self.scores.log_softmax(-1)

    @cached_property
    def probs(self) -> Tensor:  # (..., V)
        """Probabilities; exactly 0 and 1 for a point mass."""
        if self.known_probs is not None:
            return self.known_probs
        if self.hard:
            best = self.scores.argmax(-1, keepdim=True)
            return torch.zeros_like(self.scores).scatter_(-1, best, 1.0)
        return self.scores.softmax(-1)

    @property
    def mode(self) -> Tensor:  # (...)
        """The most likely token, as in greedy decoding."""
        return self.scores.argmax(-1)

    def prob(self, x: Tensor) -> Tensor:  # (...) -> (...)
        """The probability of x."""
        return self.probs.gather(-1, x[..., None]).squeeze(-1)

    def log_prob(self, x: Tensor) -> Tensor:  # (...) -> (...)
        return self.log_probs.gather(-1, x[..., None]).squeeze(-1)

    def sample(self, keys: Keys) -> Tensor:  # (...) -> (...)
        """The Gumbel-max draw; a point mass needs no noise."""
        return self.perturb(keys).argmax(-1)

    def perturb(self, keys: Keys) -> Tensor:  # (..., V)
        """Scores plus Gumbel noise.

        Its argmax is a sample, its top-k a sample without replacement.
        """
        if self.hard:
            return self.scores
        return self.scores + keys.gumbel(self.size)

    def residual(self, other: Categorical) -> Categorical:
        """The distribution proportional to (p - q)+; p itself where that is nowhere positive.

        The residual of a point mass is the point mass, whatever q; its `scores` still rank.
        """
        return self if self.hard else Categorical.from_probs(residual(self.probs, other.probs))

    def evaluate(self, like: Tensor | None = None) -> Categorical:
        """Compute the probabilities, in the dtype and on the device of `like`."""
        return Categorical(
            self.source, self.hard, self.probs if like is None else self.probs.to(like)
        )

    def invalid_mask(
        self, mask: Tensor | None = None
    ) -> Tensor:  # distribution (B, M) -> (B,) bool
        """Rows in which some position has NaN, no possible token, or an infinite best score.

        `mask` (B, M) excludes padding. One reduction without host synchronisation: read the result
        together with the verdict.
        """
        best = self.scores.amax(-1)  # propagates NaN; -inf where all is -inf
        broken = best - best  # NaN, which counts as true, for NaN and infinite values; else 0
        if mask is not None:
            broken = broken.bool() & mask
        return broken.flatten(1).any(-1)

    def entropy(self) -> Tensor:  # (...), nats
        """Shannon entropy."""
        probs = self.probs
        return -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)

    def __getitem__(self, index: Any) -> Categorical:
        if self.known_probs is None:
            return Categorical(self.scores[index], self.hard)
        return Categorical(lambda: self.scores[index], self.hard, self.known_probs[index])

    def repeat_rows(self, rows: tuple[int, ...]) -> Categorical:
        """The distributions (B, N) at N indices of these (B, M), gathered when they are used."""

        def gather() -> Tensor:
            return self.scores[:, row_index(rows, self.scores.device)]

        return Categorical(gather, self.hard, None, (self, rows))

    @staticmethod
    def where(chosen: Tensor, one: Categorical, other: Categorical) -> Categorical:
        """Select one distribution or the other per entry; `chosen` (...) is bool.

        A point mass combined with another kind of distribution keeps only the probabilities.
        """
        if one is other:
            return one
        each = chosen[..., None]
        probs = torch.where(each, one.probs, other.probs)
        if one.hard != other.hard:
            return Categorical.from_probs(probs)
        return Categorical(lambda: torch.where(each, one.scores, other.scores), one.hard, probs)

    @staticmethod
    def stack(distributions: Sequence[Categorical], dim: int = 1) -> Categorical:
        """Join distributions of equal batch shape along a new axis; recomputes probabilities."""
        return Categorical(
            torch.stack([distribution.scores for distribution in distributions], dim),
            distributions[0].hard,
        )

    @staticmethod
    def cat(distributions: Sequence[Categorical], dim: int = 1) -> Categorical:
        """Join distributions along an existing batch axis; probabilities if all were computed."""
        if len(distributions) == 1:
            return distributions[0]

        def join() -> Tensor:
            return torch.cat([one.scores for one in distributions], dim)

        hard = distributions[0].hard
        if all("probs" in vars(one) for one in distributions):
            return Categorical(join, hard, torch.cat([one.probs for one in distributions], dim))
        return Categorical(join(), hard)


@lru_cache(maxsize=64)
def row_index(rows: tuple[int, ...], device: torch.device) -> Tensor:  # (N,)
    """Indices on a device."""
    return torch.tensor(rows, device=device)


def probs_of_tokens(
    scores: Tensor, rows: Tensor, tokens: Tensor
) -> Tensor:  # (B, M, V), (B, N), (B, N) -> (B, N)
    """The softmax of scores at a row and a token each, also for scores that a point mass ranks."""
    size = scores.shape[-1]
    index = rows * size + tokens.clamp(0, size - 1)
    return scores.softmax(-1).flatten(1).gather(1, index)


def residual(p: Tensor, q: Tensor) -> Tensor:  # (..., V), (..., V) -> (..., V)
    """norm((p - q)+), or p where p equals q (Leviathan et al. 2023, eq. for p')."""
    return normalise((p - q).clamp_min(0), p)


def normalise(weights: Tensor, fallback: Tensor) -> Tensor:  # (..., V) x2 -> (..., V)
    """Normalise weights to probabilities; `fallback` where all of them are 0."""
    mass = weights.sum(-1, keepdim=True)
    return torch.where(
        mass > 0, weights / mass.clamp_min(torch.finfo(weights.dtype).tiny), fallback
    )


def as_categorical(distribution: Distribution | None) -> Categorical:
    """Narrow a distribution to a categorical one. Raises TypeError for any other."""
    if not isinstance(distribution, Categorical):
        raise TypeError(
            f"a Categorical is needed here, but the distribution is a {type(distribution).__name__}"
        )
    return distribution
