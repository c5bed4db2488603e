"""Distributions of frames: K codes at once, one of each codebook.

delay pattern (MusicGen)            depth decoder (CSM)
book 0   a1 a2 a3 a4 --             c0 ~ backbone
book 1   -- b1 b2 b3 b4             c1 ~ depth decoder, given c0
a frame is a column, whose codes    c2 ~ depth decoder, given c0 and c1
are independent given the past;     the state of the backbone goes with all
-- is forced: nothing is drawn
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

FREE = -1  # of a code that is drawn; any other number is forced
Draw = Callable[[Categorical, int], Tensor]  # distribution (R,), book -> codes (R,)


class FrameDistribution(ABC):
    """The distribution of a frame (K,) per batch entry."""

    trouble: ClassVar[str] = Categorical.trouble

    @property
    @abstractmethod
    def batch(self) -> torch.Size: ...
    @property
    @abstractmethod
    def forced(self) -> Tensor: ...  # (..., K) int64, FREE where a code is drawn
    @abstractmethod
    def given(self, frames: Tensor) -> Categorical: ...  # (..., K): each code, given those before
    @abstractmethod
    def completed(self, frames: Tensor, kept: Tensor, draw: Draw) -> Tensor:
        """Frames (R, K) whose first `kept` (R,) codes stay, and whose others are drawn."""

    @abstractmethod
    def broken(self, mask: Tensor | None = None) -> Tensor: ...
    @abstractmethod
    def __getitem__(self, index: Any) -> Any: ...

    @property
    def books(self) -> int:
        return int(self.forced.shape[-1])

    def log_prob(self, x: Tensor) -> Tensor:  # (..., K) -> (...)
        """Forced codes are certain, and say nothing."""
        free = self.forced == FREE
        said = self.given(x).log_prob(torch.where(free, x, 0))
        return torch.where(free, said, 0.0).sum(-1)

    def sample(self, keys: Keys) -> Tensor:  # keys (...) -> (..., K)
        flat = self._flat()
        blank = self.forced.new_zeros(len(keys.key.flatten()), self.books)
        draw = keyed(Keys(keys.key.flatten()))
        made = flat.completed(blank, blank[:, 0], draw)
        return made.view(*self.batch, self.books)

    def residual(self, other: Any) -> Any:
        raise TypeError("the residual of a frame has no closed form; its verifiers draw it")

    @abstractmethod
    def _flat(self) -> FrameDistribution: ...  # batch shape (R,)


@dataclass(frozen=True)
class ParallelDistribution(FrameDistribution):
    """Codes that are independent given the past: delay patterns, and what drafters record."""

    codes: Categorical  # (..., K)
    fixed: Tensor  # (..., K)

    @property
    def batch(self) -> torch.Size:
        return self.fixed.shape[:-1]

    @property
    def forced(self) -> Tensor:
        return self.fixed

    def given(self, frames: Tensor) -> Categorical:
        return self.codes

    def completed(self, frames: Tensor, kept: Tensor, draw: Draw) -> Tensor:
        made = torch.stack([draw(self.codes[:, book], book) for book in range(self.books)], -1)
        old = torch.arange(self.books, device=kept.device) < kept[:, None]
        return torch.where(self.fixed == FREE, torch.where(old, frames, made), self.fixed)

    def broken(self, mask: Tensor | None = None) -> Tensor:  # distribution (B, M) -> (B,) bool
        free = self.fixed == FREE
        return self.codes.broken(free if mask is None else free & mask[..., None])

    def __getitem__(self, index: Any) -> ParallelDistribution:
        return ParallelDistribution(self.codes[index], self.fixed[index])

    def _flat(self) -> ParallelDistribution:
        scores = self.codes.scores
        flat = Categorical(scores.reshape(-1, *scores.shape[-2:]), self.codes.hard)
        return ParallelDistribution(flat, self.fixed.reshape(-1, self.books))


class DepthDecoder(Protocol):
    """What says the codes behind the first, given the state of the backbone."""

    def distributions(
        self, states: Tensor, codes: Tensor
    ) -> Categorical: ...  # (R, H), (R, n) -> (R, n)
    def begin(self, states: Tensor) -> Any: ...  # (R, H) -> a memory
    def step(self, memory: Any, code: Tensor) -> Categorical: ...  # (R,) -> the next, (R,)


@dataclass(frozen=True)
class DepthDistribution(FrameDistribution):
    """Codes that follow each other: the first by the backbone, the others by a depth decoder.

    Distributions of drafted frames are read in one pass; a frame that is drawn takes K - 1 small
    steps.
    """

    first: Categorical  # (...)
    states: Tensor  # (..., H)
    decoder: DepthDecoder
    count: int  # K

    @property
    def batch(self) -> torch.Size:
        return self.states.shape[:-1]

    @cached_property
    def forced(self) -> Tensor:
        blank = torch.full((1,), FREE, device=self.states.device)
        return blank.expand(*self.batch, self.count)

    def given(self, frames: Tensor) -> Categorical:
        rows = prod(self.batch)
        states, codes = self.states.reshape(rows, -1), frames.reshape(rows, self.count)
        rest = self.decoder.distributions(states, codes[:, :-1]).scores
        rest = rest.view(*self.batch, self.count - 1, rest.shape[-1])
        scores = torch.cat((self.first.scores[..., None, :], rest), -2)
        return Categorical(scores, self.first.hard)

    def completed(self, frames: Tensor, kept: Tensor, draw: Draw) -> Tensor:
        made = [torch.where(kept > 0, frames[:, 0], draw(self.first, 0))]
        memory = self.decoder.begin(self.states)
        for book in range(1, self.count):
            code = draw(self.decoder.step(memory, made[-1]), book)
            made.append(torch.where(kept > book, frames[:, book], code))
        return torch.stack(made, -1)

    def broken(self, mask: Tensor | None = None) -> Tensor:
        return self.first.broken(mask) | ~self._finite(mask)

    def _finite(self, mask: Tensor | None) -> Tensor:  # (B,)
        """Whether the states that a depth decoder goes on from are numbers."""
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
            f"a distribution of frames is needed here, but the distribution is {type(distribution).__name__}"
        )
    return distribution


def book_keys(keys: Keys, books: int) -> Keys:  # (...) -> (..., K)
    """Noise of every code of a frame, keyed by its place and its book."""
    return Keys(torch.stack([keys.split(book).key for book in range(books)], -1))


def keyed(keys: Keys) -> Draw:
    """Draws with the noise of these places (R,), a stream per book."""
    return lambda distribution, book: distribution.sample(keys.split(book))
