"""How far a forecast is from what the network computes; thresholds do not carry over between them.

All take G forecasts and G computed features, flattened, and give one number each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn.functional import cosine_similarity

_TINY = 1e-10


class Metric(Protocol):
    def __call__(self, forecast: Tensor, computed: Tensor) -> Tensor: ...  # (G, M) x2 -> (G,)


@dataclass(frozen=True)
class RelativeNorm:
    """||a - b|| / ||b|| (the text of SpeCa)."""

    def __call__(self, forecast: Tensor, computed: Tensor) -> Tensor:
        gap, size = (part.square().sum(1).sqrt() for part in (forecast - computed, computed))
        return gap / size.clamp_min(_TINY)


@dataclass(frozen=True)
class RelativeL1:
    """Mean of |a - b| / |b|, element by element (the code of SpeCa).

    Elements near zero dominate it: values far above 1 are common and mean little.
    """

    def __call__(self, forecast: Tensor, computed: Tensor) -> Tensor:
        return ((forecast - computed).abs() / (computed.abs() + _TINY)).mean(1)


@dataclass(frozen=True)
class RelativeL2:
    """Root mean square of (a - b) / b, element by element."""

    def __call__(self, forecast: Tensor, computed: Tensor) -> Tensor:
        return ((forecast - computed) / (computed.abs() + _TINY)).square().mean(1).sqrt()


@dataclass(frozen=True)
class L1:
    """Mean of |a - b|."""

    def __call__(self, forecast: Tensor, computed: Tensor) -> Tensor:
        return (forecast - computed).abs().mean(1)


@dataclass(frozen=True)
class RootMeanSquare:
    """Root mean square of a - b."""

    def __call__(self, forecast: Tensor, computed: Tensor) -> Tensor:
        return (forecast - computed).square().mean(1).sqrt()


@dataclass(frozen=True)
class CosineDistance:
    """1 - cosine of the angle between a and b."""

    def __call__(self, forecast: Tensor, computed: Tensor) -> Tensor:
        return 1 - cosine_similarity(forecast, computed, dim=1)


METRICS: dict[str, Metric] = {
    "relative-norm": RelativeNorm(),
    "relative-l1": RelativeL1(),
    "relative-l2": RelativeL2(),
    "l1": L1(),
    "rms": RootMeanSquare(),
    "cosine": CosineDistance(),
}
