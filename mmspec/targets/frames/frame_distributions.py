"""Distributions of frames: K codes, one per codebook.

delay pattern (MusicGen)            depth decoder (CSM)
book 0   a1 a2 a3 a4 --             c0 ~ backbone
book 1   -- b1 b2 b3 b4             c1 ~ depth decoder, given c0
a frame is a column, whose codes    c2 ~ depth decoder, given c0 and c1
are independent given the past;     (all given the state of the backbone)
-- is fixed: nothing is sampled
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Keys

FREE = -1  # of a code that is sampled; any other number is fixed
Draw = Callable[[Categorical, int], Tensor]  # distribution (R,), book -> codes (R,)


class FrameDistribution(ABC):
    """The distribution of a frame (K,) per batch entry."""

    invalid_reason: ClassVar[str] = Categorical.invalid_reason

    @property
    @abstractmethod
    def batch(self) -> torch.Size: ...
    @property
    @abstractmethod
    def fixed_codes(self) -> Tensor: ...  # (..., K) int64, FREE where a code is sampled
    @abstractmethod
    def code_distributions(
        self, frames: Tensor
    ) -> Categorical: ...  # (..., K): each code, given those before
    @abstractmethod
    def complete(self, frames: Tensor, kept: Tensor, draw: Draw) -> Tensor:
        """Keep the first `kept` (R,) codes of frames (R, K) and sample the others."""

    @abstractmethod
    def invalid_mask(self, mask: Tensor | None = None) -> Tensor: ...
    @abstractmethod
    def __getitem__(self, index: Any) -> Any: ...

    @property
    def books(self) -> int:
        return int(self.fixed_codes.shape[-1])

    def log_prob(self, x: Tensor) -> Tensor:  # (..., K) -> (...)
        """Log-probability of the frame; a fixed code is certain, and no other one possible."""
        fixed = self.fixed_codes
        log_probs = self.code_distributions(x).log_prob(torch.where(fixed == FREE, x, 0))
        certain = torch.where(x == fixed, 0.0, -torch.inf)
        return torch.where(fixed == FREE, log_probs, certain).sum(-1)

    def sample(self, keys: Keys) -> Tensor:  # keys (...) -> (..., K)
        flat = self._flat()
        blank = self.fixed_codes.new_zeros(len(keys.key.flatten()), self.books)
        draw = keyed_draw(Keys(keys.key.flatten()))
        made = flat.complete(blank, blank[:, 0], draw)
        return made.view(*self.batch, self.books)

    def residual(self, other: Any) -> Any:
        raise TypeError("the residual of a frame has no closed form; its verifiers sample from it")

    @abstractmethod
    def _flat(self) -> FrameDistribution: ...  # batch shape (R,)


@dataclass(frozen=True)
class ParallelDistribution(FrameDistribution):
    """Codes that are independent given the past: delay patterns, and records of drafters."""

    codes: Categorical  # (..., K)
    fixed: Tensor  # (..., K)

    @property
    def batch(self) -> torch.Size:
        return self.fixed.shape[:-1]

    @property
    def fixed_codes(self) -> Tensor:
        return self.fixed

    def code_distributions(self, frames: Tensor) -> Categorical:
        return self.codes

    def complete(self, frames: Tensor, kept: Tensor, draw: Draw) -> Tensor:
        made = torch.stack([draw(self.codes[:, book], book) for book in range(self.books)], -1)
        old = torch.arange(self.books, device=kept.device) < kept[:, None]
        return torch.where(self.fixed == FREE, torch.where(old, frames, made), self.fixed)

    def invalid_mask(
        self, mask: Tensor | None = None
    ) -> Tensor:  # distribution (B, M) -> (B,) bool
        free = self.fixed == FREE
        return self.codes.invalid_mask(free if mask is None else free & mask[..., None])

    def __getitem__(self, index: Any) -> ParallelDistribution:
        return ParallelDistribution(self.codes[index], self.fixed[index])

    def _flat(self) -> ParallelDistribution:
        scores = self.codes.scores
        flat = Categorical(scores.reshape(-1, *scores.shape[-2:]), self.codes.hard)
        return ParallelDistribution(flat, self.fixed.reshape(-1, self.books))


class DepthDecoder(Protocol):
    """Predicts the codes after the first, given the state of the backbone."""

    def distributions(
        self, states: Tensor, codes: Tensor
    ) -> Categorical: ...  # (R, H), (R, n) -> (R, n)
    def begin(self, states: Tensor) -> Any: ...  # (R, H) -> a memory
    def step(self, memory: Any, code: Tensor) -> Categorical: ...  # (R,) -> the next, (R,)


@dataclass(frozen=True)
class DepthDistribution(FrameDistribution):
    """Sequential codes: the first by the backbone, the others by a depth decoder.

    Distributions of drafted frames take one pass; sampling a frame takes K - 1 small steps.
    """

    first: Categorical  # (...)
    states: Tensor  # (..., H)
    decoder: DepthDecoder
    count: int  # K

    @property
    def batch(self) -> torch.Size:
        return self.states.shape[:-1]

    @cached_property
    def fixed_codes(self) -> Tensor:
        blank = torch.full((1,), FREE, device=self.states.device)
        return blank.expand(*self.batch, self.count)

    def code_distributions(self, frames: Tensor) -> Categorical:
        rows = prod(self.batch)
        states, codes = self.states.reshape(rows, -1), frames.reshape(rows, self.count)
        rest = self.decoder.distributions(states, codes[:, :-1]).scores
        rest = rest.view(*self.batch, self.count - 1, rest.shape[-1])
        scores = torch.cat((self.first.scores[..., None, :], rest), -2)
        return Categorical(scores, self.first.hard)

    def complete(self, frames: Tensor, kept: Tensor, draw: Draw) -> Tensor:
        made = [torch.where(kept > 0, frames[:, 0], draw(self.first, 0))]
        memory = self.decoder.begin(self.states)
        for book in range(1, self.count):
            code = draw(self.decoder.step(memory, made[-1]), book)
            made.append(torch.where(kept > book, frames[:, book], code))
        return torch.stack(made, -1)

    def invalid_mask(self, mask: Tensor | None = None) -> Tensor:
        return self.first.invalid_mask(mask) | ~self._finite(mask)

    def _finite(self, mask: Tensor | None) -> Tensor:  # (B,)
        """Whether the input states of the depth decoder are finite."""
        fine = self.states.isfinite().all(-1)
        return (fine if mask is None else fine | ~mask).flatten(1).all(-1)

    def __getitem__(self, index: Any) -> DepthDistribution:
        return replace(self, first=self.first[index], states=self.states[index])

    def _flat(self) -> DepthDistribution:
        scores = self.first.scores
        flat = Categorical(scores.reshape(-1, scores.shape[-1]), self.first.hard)
        return replace(self, first=flat, states=self.states.reshape(-1, self.states.shape[-1]))


def frame_distribution(distribution: Any) -> FrameDistribution:
    """Narrow a distribution to one of frames."""
    if not isinstance(distribution, FrameDistribution):
        raise TypeError(
            f"a distribution of frames is needed here, but this is a {type(distribution).__name__}"
        )
    return distribution


def book_keys(keys: Keys, books: int) -> Keys:  # (...) -> (..., K)
    """Noise of every code of a frame, keyed by its position and codebook."""
    return Keys(torch.stack([keys.split(book).key for book in range(books)], -1))


def keyed_draw(keys: Keys) -> Draw:
    """A sampler with the noise of these positions (R,), one stream per codebook."""
    return lambda distribution, book: distribution.sample(keys.split(book))
