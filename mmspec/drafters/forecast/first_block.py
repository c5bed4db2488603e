"""diffusers' own first-block cache, attached and given back like our forecasts: a baseline.

The first block is always computed. Where its residual has changed by less than the threshold since
the last step in full, the residual of all other blocks is taken from there. Lossy; one decision for
the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from mmspec.drafters.forecast.cached_network import CachedNetwork
from mmspec.drafters.forecast.hooks import Attached, Statistics
from mmspec.drafters.forecast.steps import StepClock, networks_of
from mmspec.recipe import Kit


@runtime_checkable
class BlockResidual(Protocol):
    """The verifier: how much the first block's residual may change (`verifiers.first_block`)."""

    @property
    def threshold(self) -> float: ...


@dataclass(frozen=True)
class FirstBlockCache:
    """The recipe's architecture; `under` binds it to a threshold."""

    threshold: float = 0.0

    def under(self, gate: object) -> FirstBlockCache:
        """Raises ValueError for a verifier that judges something else."""
        if not isinstance(gate, BlockResidual):
            raise ValueError(
                f"{type(gate).__name__} does not judge the first block; give verifier= a "
                "FirstBlockGate"
            )
        return FirstBlockCache(gate.threshold)

    def attach(self, pipe: Any, samples: int | None = None) -> Attached:
        """Put the cache onto the pipeline's networks for one call; call the result to remove it.

        Raises ValueError for networks that the cache of diffusers does not serve.
        """
        statistics, clock = Statistics(), StepClock()

        def one(network: nn.Module) -> CachedNetwork:
            return CachedNetwork(network, self.threshold, clock, statistics)

        return Attached.to(networks_of(pipe), one, statistics)


def first_block_cache(kit: Kit) -> FirstBlockCache:
    """The cache of diffusers."""
    return FirstBlockCache()
