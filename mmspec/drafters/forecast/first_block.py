"""The first-block cache of diffusers.

The first block is always computed. Where its residual has changed by less than the threshold since
the last full step, the residual of all other blocks is reused from there. Lossy; one decision for
the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache
from diffusers.hooks.first_block_cache import _FBC_BLOCK_HOOK, _FBC_LEADER_BLOCK_HOOK
from torch import nn

from mmspec.drafters.forecast.attached import AttachedNetworks
from mmspec.drafters.forecast.cached import (
    SamplerCall,
    attach_cache,
    check_blocks,
    check_streams,
    hook_of,
)
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
    title: ClassVar[str] = "diffusers' first-block cache"
    hooks: ClassVar[tuple[str, ...]] = (_FBC_LEADER_BLOCK_HOOK, _FBC_BLOCK_HOOK)

    def under(self, gate: object) -> FirstBlockCache:
        """Bind to a verifier. Raises ValueError for one that judges something else."""
        if not isinstance(gate, BlockResidual):
            raise ValueError(
                f"{type(gate).__name__} does not judge the first block; give verifier= a "
                "FirstBlockGate"
            )
        return FirstBlockCache(gate.threshold)

    def attach(self, pipe: Any, samples: int | None = None) -> AttachedNetworks:
        """Attach the cache to the pipeline's networks for one call; call the result to detach it.

        Raises ValueError for networks that the cache of diffusers does not support.
        """
        return attach_cache(self, pipe)

    def install(self, network: nn.Module, index: int) -> FirstBlockHooks:
        """Register the hooks of diffusers."""
        blocks = check_blocks(network, self.title)
        check_streams(network, blocks, self.title)
        apply_first_block_cache(network, FirstBlockCacheConfig(self.threshold))
        return FirstBlockHooks(blocks[1:], hook_of(blocks[0], _FBC_LEADER_BLOCK_HOOK))


@dataclass(frozen=True)
class FirstBlockHooks:
    """The hooks in one network."""

    modules: Sequence[nn.Module]
    head: Any  # FBCHeadBlockHook

    def enter(self, call: SamplerCall) -> None:
        """Do nothing: the first block decides."""

    def reused(self) -> Sequence[bool]:
        computed = bool(self.head.state_manager.get_state().should_compute)
        return [not computed] * len(self.modules)

    def close(self, complete: bool) -> None:
        """Do nothing."""


def first_block_cache(kit: Kit) -> FirstBlockCache:
    """The cache of diffusers."""
    return FirstBlockCache()
