"""MagCache of diffusers: the residual of all blocks is reused while its magnitude hardly changes.

Ma et al. 2025 (arXiv 2506.09045). How the residual's norm changes from step to step hardly depends
on the prompt, so it is measured once, in a call that computes every step. Later calls skip steps
until the change accumulated since the last full step exceeds a threshold. Lossy; one decision for
the whole batch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from diffusers.hooks import MagCacheConfig, apply_mag_cache
from diffusers.hooks.mag_cache import (
    _MAG_CACHE_BLOCK_HOOK,
    _MAG_CACHE_LEADER_BLOCK_HOOK,
    nearest_interp,
)
from torch import nn

from mmspec.drafters.forecast.attached import AttachedNetworks
from mmspec.drafters.forecast.cached import (
    SamplerCall,
    attach_cache,
    check_blocks,
    check_lists,
    forget_unmeasured,
    hook_of,
    is_measured,
    parse_lists,
)
from mmspec.recipe import Kit

log = logging.getLogger("mmspec")


@runtime_checkable
class MagnitudeRule(Protocol):
    """The verifier: how far the magnitude may move (`verifiers.cached_steps`)."""

    @property
    def error(self) -> float: ...
    @property
    def most(self) -> int: ...
    @property
    def retention(self) -> float: ...


@dataclass(frozen=True)
class MagnitudeCache:
    """The recipe's architecture; `ratios` are those of each network, empty until measured."""

    gate: MagnitudeRule | None = None
    ratios: list[list[float]] = field(default_factory=list)
    least_steps: ClassVar[int] = 2  # of a call that measures: the first ratio is always 1
    title: ClassVar[str] = "diffusers' MagCache"
    hooks: ClassVar[tuple[str, ...]] = (_MAG_CACHE_LEADER_BLOCK_HOOK, _MAG_CACHE_BLOCK_HOOK)

    def under(self, gate: object) -> MagnitudeCache:
        """Bind to a verifier. Raises ValueError for one that judges something else."""
        if not isinstance(gate, MagnitudeRule):
            raise ValueError(
                f"{type(gate).__name__} does not judge magnitudes of residuals; give verifier= a "
                "MagnitudeGate"
            )
        return MagnitudeCache(gate, self.ratios)

    @property
    def measured(self) -> Mapping[str, Any]:
        """Options that a call has measured; empty before."""
        return {"ratios": self.ratios} if is_measured(self.ratios) else {}

    def attach(self, pipe: Any, samples: int | None = None) -> AttachedNetworks:
        """Attach the cache to the pipeline's networks for one call; call the result to detach it.

        Raises ValueError for networks that the cache of diffusers does not support.
        """
        forget_unmeasured(self.ratios)
        attached = attach_cache(self, pipe)
        check_lists("ratios", self.ratios, attached)
        return attached

    def install(self, network: nn.Module, index: int) -> MagnitudeHooks:
        """Register the hooks of diffusers."""
        blocks = check_blocks(network, self.title, least=1)
        gate = self.gate
        assert gate is not None
        settings = {
            "threshold": gate.error,
            "max_skip_steps": gate.most,
            "retention_ratio": gate.retention,
            "num_inference_steps": sys.maxsize,  # until the call has begun
        }
        config = MagCacheConfig(**settings, calibrate=True)
        apply_mag_cache(network, config)
        config.calibrate = not self.ratios
        head = hook_of(blocks[0], _MAG_CACHE_LEADER_BLOCK_HOOK)
        return MagnitudeHooks(blocks, head, config, self.ratios, index)


@dataclass
class MagnitudeHooks:
    """The hooks in one network."""

    modules: Sequence[nn.Module]
    head: Any  # MagCacheHeadHook
    config: MagCacheConfig
    ratios: list[list[float]]  # of all networks
    index: int  # of this network
    first: str | None = None  # state of the first call
    _measured: list[float] = field(default_factory=list)  # of that state

    def enter(self, call: SamplerCall) -> None:
        """Set the ratios in the first call, when the number of steps is known."""
        if self.first is not None:
            return
        self.first = call.state
        if self.ratios:  # experts share the steps as they did when measured
            mine, everyone = len(self.ratios[self.index]), sum(map(len, self.ratios))
            steps = max(round(call.steps * mine / everyone), 1)
            ratios = nearest_interp(torch.tensor(self.ratios[self.index]), steps).tolist()
            self.config.mag_ratios, self.config.num_inference_steps = ratios, steps

    def reused(self) -> Sequence[bool]:
        state = self.head.state_manager.get_state()
        if self.head.state_manager.context.name == self.first:
            self._measured = state.calibration_ratios  # pipelines reset states at their end
        return [not state.should_compute] * len(self.modules)

    def close(self, complete: bool) -> None:
        """Keep what was measured, if the sampling call reached its end."""
        if not self.config.calibrate or not complete:
            return
        is_enough = len(self._measured) >= MagnitudeCache.least_steps
        measured = [round(one, 4) for one in self._measured] if is_enough else []
        self.ratios.insert(0, measured)  # networks are closed in reverse
        if self.index or not is_measured(self.ratios):
            return
        log.warning(
            "'mag-cache' computed every step of this call, to measure the network's ratios; later "
            "calls skip steps. To skip in the first call too, give ratios=%s",
            self.ratios if len(self.ratios) > 1 else self.ratios[0],
        )


def magnitude_cache(kit: Kit) -> MagnitudeCache:
    """The option `ratios`: None, one list, or one for each network."""
    given: Any = kit.options["ratios"]
    if given is None:
        return MagnitudeCache()
    return MagnitudeCache(ratios=parse_lists("ratios", given, "to measure them", 0))
