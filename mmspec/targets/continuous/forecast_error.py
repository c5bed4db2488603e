"""Error metrics of forecasts against computed features; thresholds differ between metrics.

All take G forecasts and G computed features, flattened, and return one number each.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import cosine_similarity

_TINY = 1e-10
Metric = Callable[[Tensor, Tensor], Tensor]  # forecast, computed: (G, M) x2 -> (G,)


def relative_norm(forecast: Tensor, computed: Tensor) -> Tensor:
    """||a - b|| / ||b|| (the text of SpeCa)."""
    gap, size = (part.square().sum(1).sqrt() for part in (forecast - computed, computed))
    return gap / size.clamp_min(_TINY)


def relative_l1(forecast: Tensor, computed: Tensor) -> Tensor:
    """Mean of |a - b| / |b|, element by element (the code of SpeCa).

    Elements near zero dominate it: values far above 1 are common and mean little.
    """
    return ((forecast - computed).abs() / (computed.abs() + _TINY)).mean(1)


def relative_l2(forecast: Tensor, computed: Tensor) -> Tensor:
    """Root mean square of (a - b) / b, element by element."""
    return ((forecast - computed) / (computed.abs() + _TINY)).square().mean(1).sqrt()


def l1(forecast: Tensor, computed: Tensor) -> Tensor:
    """Mean of |a - b|."""
    return (forecast - computed).abs().mean(1)


def rms(forecast: Tensor, computed: Tensor) -> Tensor:
    """Root mean square of a - b."""
    return (forecast - computed).square().mean(1).sqrt()


def cosine(forecast: Tensor, computed: Tensor) -> Tensor:
    """1 - cosine of the angle between a and b."""
    return 1 - cosine_similarity(forecast, computed, dim=1)


METRICS: dict[str, Metric] = {
    "relative-norm": relative_norm,
    "relative-l1": relative_l1,
    "relative-l2": relative_l2,
    "l1": l1,
    "rms": rms,
    "cosine": cosine,
}
