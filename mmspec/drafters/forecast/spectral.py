"""SeaCache of diffusers: the residual of all blocks is reused while filtered states hardly change.

As in TeaCache (Liu et al. 2025) the relative change of an indicator is accumulated over the steps,
and a full step begins once it exceeds a threshold. The indicator of SeaCache (arXiv 2602.18993) are
the states themselves, filtered by the frequencies that a denoiser could recover at their noise
level; TeaCache fits a polynomial per model instead. Lossy; one decision for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from diffusers.hooks import SeaCacheConfig, apply_sea_cache
from diffusers.hooks.sea_cache import (
    _SEA_CACHE_BLOCK_HOOK,
    _SEA_CACHE_LEADER_BLOCK_HOOK,
    _SEA_CACHE_POST_NORM_HOOK,
    _SEA_CACHE_ROOT_HOOK,
)
from torch import Tensor, nn

from mmspec.drafters.forecast.attached import AttachedNetworks
from mmspec.drafters.forecast.cached import (
    SamplerCall,
    attach_cache,
    check_blocks,
    check_streams,
    hook_of,
)
from mmspec.drafters.forecast.features import tensors
from mmspec.recipe import Kit

SEA_CACHE_HOOKS = (
    *(_SEA_CACHE_POST_NORM_HOOK, _SEA_CACHE_BLOCK_HOOK),
    *(_SEA_CACHE_LEADER_BLOCK_HOOK, _SEA_CACHE_ROOT_HOOK),
)


@runtime_checkable
class AccumulatedChange(Protocol):
    """The verifier: how far the indicator may move (`verifiers.cached_steps`)."""

    @property
    def change(self) -> float: ...
    @property
    def most(self) -> int: ...
    @property
    def warm_up(self) -> int: ...


@dataclass(frozen=True)
class SpectralCache:
    """The recipe's architecture; `order` 1 extrapolates the residual, 0 repeats it."""

    order: int = 1
    gate: AccumulatedChange | None = None
    title: ClassVar[str] = "diffusers' SeaCache"
    hooks: ClassVar[tuple[str, ...]] = SEA_CACHE_HOOKS

    def __post_init__(self) -> None:
        if self.order not in (0, 1):
            raise ValueError(f"order={self.order!r} must be 0 (repeat) or 1 (extrapolate)")

    def under(self, gate: object) -> SpectralCache:
        """Bind to a verifier. Raises ValueError for one that judges something else."""
        if not isinstance(gate, AccumulatedChange):
            raise ValueError(
                f"{type(gate).__name__} does not judge accumulated changes; give verifier= an "
                "AccumulatedChangeGate"
            )
        return SpectralCache(self.order, gate)

    def attach(self, pipe: Any, samples: int | None = None) -> AttachedNetworks:
        """Attach the cache to the pipeline's networks for one call; call the result to detach it.

        Raises ValueError for networks that the cache of diffusers does not support.
        """
        return attach_cache(self, pipe)

    def install(self, network: nn.Module, index: int) -> SpectralHooks:
        """Register the hooks of diffusers."""
        blocks = check_blocks(network, self.title)
        check_streams(network, blocks, self.title)
        gate, views = self.gate, list[Tensor]()
        assert gate is not None
        config = SeaCacheConfig(
            gate.change,
            residual_order=self.order,
            retention_steps=gate.warm_up,
            max_consecutive_cached=gate.most,
            raw_vision_callback=lambda *given: views,
        )
        apply_sea_cache(network, config)
        return SpectralHooks(blocks, hook_of(network, _SEA_CACHE_ROOT_HOOK), views)


@dataclass(frozen=True)
class SpectralHooks:
    """The hooks in one network."""

    modules: Sequence[nn.Module]
    root: Any  # SeaCacheRootHook
    views: list[Tensor]  # states of the call in progress

    def enter(self, call: SamplerCall) -> None:
        """Show the states to the hooks: the first argument of the network."""
        states = tensors(next(iter(call.arguments.values())))
        self.views[:] = [view for batch in states for view in _as_clips(batch)]

    def reused(self) -> Sequence[bool]:
        skipped = self.root.state_manager.get_state().consecutive_cached > 0
        return [skipped] * len(self.modules)

    def close(self, complete: bool) -> None:
        """Do nothing."""


def _as_clips(states: Tensor) -> list[Tensor]:  # (C, T, H, W) each
    """Images (B, C, H, W), clips (B, C, T, H, W) and token sequences (B, S, C) as clips.

    A sequence is filtered along its single axis.
    """
    if states.dim() == 3:
        return list(states.transpose(1, 2)[:, :, None, None].unbind())
    if states.dim() == 4:
        return list(states[:, :, None].unbind())
    return list(states.unbind())


def spectral_cache(kit: Kit) -> SpectralCache:
    """The option `order`."""
    return SpectralCache(kit.options["order"])
