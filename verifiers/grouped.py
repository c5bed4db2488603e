"""Grouped speculative decoding: compare the masses of token groups, then accept the token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.verifiers.walk import gather_token, ratio


class Grouping(Protocol):
    """Which tokens are interchangeable at a position."""

    def masses(
        self, p: Tensor, q: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]: ...  # (..., V) x2, (...) -> (...) x2: the group of x under p and q


class TokenDistance(Protocol):
    """Distances between tokens, such as `mmspec.codes.codebook.Codebook`."""

    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor: ...  # (...) x2 broadcast -> (...)


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Distances between the model's input embeddings of image tokens; infinite for other tokens."""

    embed: Callable[[Tensor], Tensor]  # (1, n) -> (1, n, D)
    codes: Tensor  # (V,) of each token, -1 = none

    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor:  # (...) x2 broadcast -> (...)
        none = (self.codes[x] < 0) | (self.codes[y] < 0)
        return (self._rows(x) - self._rows(y)).square().sum(-1).masked_fill(none, torch.inf)

    def _rows(self, tokens: Tensor) -> Tensor:  # (...) -> (..., D)
        return self.embed(tokens.reshape(1, -1)).float().reshape(*tokens.shape, -1)


@dataclass(frozen=True)
class Grouped:
    """Accept with min(1, P / Q), P and Q the group's mass under p and q (GSD, So et al. 2025).

    The accepted token is x itself; corrections come from norm((p - q)+). Lossy. Disjoint groups
    accept at least as often as `Exact`; windows may overlap, and may accept a token less often.
    Groups of one token are `Exact`.
    """

    grouping: Grouping
    lossless: ClassVar[bool] = False

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        return ratio(*self.grouping.masses(p.probs, q.probs, x))

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p.residual(q)


@dataclass(frozen=True)
class RankWindow:
    """About `size` tokens next to x in the ranking of p, half of them below it.

    Tokens whose probability differs by `gap` or more are excluded, and with a `codebook` (or
    `Embeddings`) those at a squared distance of `distance` or more. The paper tries sizes 3, 10, 25
    and 50; its code runs 14 with gap=0.15 and distance=0.5 between rows of the input embedding. A
    token with p(x) = 0 forms a group of one; the released code gives it the group that results from
    the order of ties. A window below the lowest rank is cut; the released code then compares x
    alone. Tokens that are no codes are excluded from a window; the released code then compares no
    distances at all.
    """

    size: int
    gap: float = 0.15
    codebook: TokenDistance | None = None
    distance: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 0 or not self.gap > 0 or not self.distance > 0:
            raise ValueError(
                f"size={self.size}, gap={self.gap}, distance={self.distance}; a size is at least "
                "0 (groups of one), gap and distance are positive"
            )

    def masses(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        order = p.argsort(dim=-1, stable=True)
        rank = (order == x[..., None]).int().argmax(-1, keepdim=True)
        below = self.size // 2
        place = rank + torch.arange(-below, max(self.size - below, 1), device=p.device)
        inside = (place >= 0) & (place < p.shape[-1])
        near = order.gather(-1, place.clamp(0, p.shape[-1] - 1))
        own, others = gather_token(p, x)[..., None], p.gather(-1, near)
        member = inside & (own > 0) & ((others - own).abs() < self.gap)
        if self.codebook is not None:
            member &= self.codebook.squared_distance(x[..., None], near) < self.distance
        member |= inside & (near == x[..., None])
        return (others * member).sum(-1), (q.gather(-1, near) * member).sum(-1)
