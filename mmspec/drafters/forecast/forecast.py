"""Extrapolation of features over the steps of a sampler, from the steps computed in full.

    full at step   3        5              computed: F(3), F(5)
    forecast at             6    7         F(5) + 1 (F(5) - F(3)) / 2,  F(5) + 2 (F(5) - F(3)) / 2

Every row of the batch has its own history, since rows may be computed in full at different steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mmspec.errors import check_number

HIGHEST_ORDER = 16  # polynomials of higher degree are dominated by rounding


class Basis(Protocol):
    """Which differences of features are stored, and their weights in a forecast.

    `nodes` (R, order + 1) are the steps computed in full, the newest first.
    """

    def divisors(self, now: int, nodes: Tensor) -> Tensor: ...  # -> (R, order)
    def weights(self, step: int, nodes: Tensor) -> Tensor: ...  # -> (R, order + 1)


@dataclass(frozen=True)
class Taylor:
    """TaylorSeer (Liu et al. 2025): all differences over the latest spacing, weights k^j / j!.

    Exact for features affine in the step. Of order 2 and more it is not exact even for polynomials:
    differences are backward, so c k^2 is missed by h k c.
    """

    def divisors(self, now: int, nodes: Tensor) -> Tensor:
        return (now - nodes[:, :1]).expand(-1, nodes.shape[1] - 1)

    def weights(self, step: int, nodes: Tensor) -> Tensor:
        ahead = step - nodes[:, 0]
        terms = [ahead**j / math.factorial(j) for j in range(nodes.shape[1])]
        return torch.stack(terms, 1)


@dataclass(frozen=True)
class Newton:
    """Divided differences over the true steps: exact for polynomials up to the order."""

    def divisors(self, now: int, nodes: Tensor) -> Tensor:
        return now - nodes[:, :-1]

    def weights(self, step: int, nodes: Tensor) -> Tensor:
        products = (step - nodes[:, :-1]).cumprod(1)
        return torch.cat((torch.ones_like(nodes[:, :1]), products), 1)


@dataclass
class Timeline:
    """The steps at which each of R rows was computed in full, for all features of a network."""

    basis: Basis
    nodes: Tensor  # (R, order + 1) float32, newest first; undefined from `known` on
    known: Tensor  # (R,) int64, usable full steps, at most order + 1
    start: int = 0  # the first step with differences to the one before

    @classmethod
    def begin(
        cls, basis: Basis, order: int, rows: int, device: torch.device, start: int = 0
    ) -> Timeline:
        """An empty timeline. Raises ValueError for an order below 0 or above `HIGHEST_ORDER`.

        A step before `start` is recorded without differences to earlier ones.
        """
        check_number("order", order, 0, HIGHEST_ORDER, whole=True)
        nodes = torch.full((rows, order + 1), -1.0, device=device)
        return cls(basis, nodes, torch.zeros(rows, dtype=torch.int64, device=device), start)

    @property
    def order(self) -> int:
        return self.nodes.shape[1] - 1

    def weights(self, step: int) -> Tensor:  # (R, order + 1)
        """Weight of each factor in a forecast of `step`; 0 where a row lacks it."""
        index = torch.arange(self.order + 1, device=self.nodes.device)
        return self.basis.weights(step, self.nodes) * (index < self.known[:, None])

    def advance(self, step: int, rows: Tensor) -> Tensor:  # (R',) -> (R', order)
        """Record that `rows` are computed at `step`; returns the scale of their differences."""
        nodes, known = self.nodes[rows], self.known[rows] * int(step >= self.start)
        index = torch.arange(self.order, device=nodes.device)
        is_known = index < known[:, None]
        scale = is_known / torch.where(is_known, self.basis.divisors(step, nodes), 1.0)
        now = torch.full_like(nodes[:, :1], step)
        self.nodes = self.nodes.index_copy(0, rows, torch.cat((now, nodes[:, :-1]), 1))
        self.known = self.known.index_copy(0, rows, (known + 1).clamp_max(self.order + 1))
        return scale


@dataclass
class Factors:
    """The differences of one feature: `values[j]` (R, *F) is of order j."""

    values: list[Tensor] = field(default_factory=list)

    def record(self, feature: Tensor, scale: Tensor, rows: Tensor | None) -> None:
        """Record a feature (R', *F) of `rows` (R',), or of all, with the scale of `advance`.

        Raises ValueError for a feature of another shape than in the step before.
        """
        if not self.values:
            self.values = [feature]
            return
        if feature.shape[1:] != self.values[0].shape[1:]:
            raise ValueError(
                f"a layer gives features of shape {tuple(feature.shape)}, and gave "
                f"{tuple(self.values[0].shape)} in the step before: this pipeline denoises parts "
                "of different lengths with one network, which forecasts do not follow; call the "
                "pipeline itself"
            )
        fresh = [feature]
        for j in range(min(scale.shape[1], len(self.values))):
            old = self.values[j] if rows is None else self.values[j][rows]
            fresh.append((fresh[j] - old) * _scale_rows(scale[:, j], feature))
        if rows is None:
            self.values = fresh
            return
        while len(self.values) < len(fresh):
            self.values.append(torch.zeros_like(self.values[0]))
        self.values = [
            value.index_copy(0, rows, new) for value, new in zip(self.values, fresh, strict=True)
        ]

    def forecast(self, weights: Tensor) -> Tensor:  # (R, order + 1) -> (R, *F)
        """The sum of the factors, weighted per row."""
        total = self.values[0].clone()
        for j, value in enumerate(self.values[1:], 1):
            total += _scale_rows(weights[:, j], value) * value
        return total


def _scale_rows(values: Tensor, rebuild_output: Tensor) -> Tensor:
    """One value per row (R,), with the shape and type to multiply `like` (R, *F)."""
    return values.to(rebuild_output.dtype).reshape(-1, *(1,) * (rebuild_output.dim() - 1))
