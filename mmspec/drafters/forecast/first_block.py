"""diffusers' own first-block cache, attached for one sampling call: a baseline.

The first block is always computed. Where its residual has changed by less than the threshold since
the last full step, the residual of all other blocks is reused from there. Lossy; one decision for
the whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, apply_first_block_cache
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.first_block_cache import _FBC_BLOCK_HOOK, _FBC_LEADER_BLOCK_HOOK
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from torch import nn

from mmspec.drafters.forecast.attached import AttachedNetworks, NetworkCall, Statistics
from mmspec.drafters.forecast.compiled import unwrap_compiled
from mmspec.drafters.forecast.features import ForwardOverride, is_overridden, transformer_blocks
from mmspec.drafters.forecast.steps import StepClock, check_finite, networks_of, time_of
from mmspec.drafters.forecast.work import PassWork, count_work
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
        statistics, clock = Statistics(), StepClock()

        def one(network: nn.Module) -> CachedNetwork:
            return CachedNetwork(network, self.threshold, clock, statistics)

        return AttachedNetworks.to(networks_of(pipe), one, statistics)


class CachedNetwork:
    """A network with the cache attached, one state per call of a step; call it to detach."""

    def __init__(
        self, network: nn.Module, threshold: float, clock: StepClock, statistics: Statistics
    ) -> None:
        called, network = network, unwrap_compiled(network)
        blocks = transformer_blocks(network)
        _check(called, blocks)
        self.statistics, self._clock, self._network = statistics, clock, network
        self._signature = inspect.signature(network.forward)
        self._step, self._ordinal = -1, 0  # of the last call
        self._skipped, self._work = blocks[1:], dict[int, PassWork]()  # by call within a step
        self._is_compiled = called is not network or any(
            one._compiled_call_impl is not None for one in (network, *blocks)
        )
        self._owned = [(block, set(vars(block))) for block in (network, *blocks)]
        apply_first_block_cache(network, FirstBlockCacheConfig(threshold))
        self._registry = HookRegistry.check_if_exists_or_initialize(network)
        self._registry.invalidate_child_registries_cache()
        head = HookRegistry.check_if_exists_or_initialize(blocks[0])
        self._shared = head.get_hook(_FBC_LEADER_BLOCK_HOOK).state_manager
        self._overrides = ForwardOverride(called, self._call)

    def __call__(self) -> None:
        """Restore the network."""
        self._overrides.restore()
        for hook in (_FBC_LEADER_BLOCK_HOOK, _FBC_BLOCK_HOOK):
            self._registry.remove_hook(hook, recurse=True)
        self._registry.invalidate_child_registries_cache()
        for module, owned in self._owned:
            for name in {"forward", "_diffusers_hook"} & vars(module).keys() - owned:
                delattr(module, name)

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        arguments = self._signature.bind(*args, **kwargs).arguments
        step = self._clock.step_at(time_of(arguments))
        self._ordinal = self._ordinal + 1 if step == self._step else 0
        self._step = step
        _set_cache_context(self._network, CacheContext(str(self._ordinal)))
        try:
            output = self._run(partial(original, *args, **kwargs))
        except (TypeError, IndexError) as error:  # of the hooks of diffusers
            raise ValueError(
                f"diffusers' first-block cache does not support {type(self._network).__name__} as "
                f"this pipeline calls it ({error}); use the recipe taylorseer or speca"
            ) from error
        check_finite(output, step)
        computed = bool(self._shared.get_state().should_compute)
        work = self._work.get(self._ordinal)
        self.statistics.add_work(work, computed, not computed, False)
        spent = perf_counter() - start
        seconds = (0.0, spent) if computed else (spent, 0.0)
        made = ((not computed,), (computed,), (None,), None)
        self.statistics.add_call(NetworkCall(*made, start, seconds))
        return output

    def _run(self, call: Callable[[], Any]) -> Any:
        """The network's output; the first pass, which is in full, is counted unless compiled."""
        if self._is_compiled or self._ordinal in self._work:
            return call()
        output, self._work[self._ordinal] = count_work(call, self._skipped)
        return output


def _check(network: nn.Module, blocks: list[nn.Module]) -> None:
    name = type(unwrap_compiled(network)).__name__
    if len(blocks) < 2:
        raise ValueError(
            f"{name} has {len(blocks)} transformer blocks, and the cache needs two; use the recipe "
            "taylorseer"
        )
    if is_overridden(network) or getattr(network, "is_cache_enabled", False):
        raise ValueError(f"{name} already has a cache; remove it first")
    for kind in {type(block) for block in blocks}:
        try:
            TransformerBlockRegistry.get(kind)
        except ValueError:
            raise ValueError(
                f"diffusers' first-block cache does not know the {kind.__name__} of {name}; use "
                "the recipe taylorseer or speca"
            ) from None
    if getattr(blocks[-1], "context_pre_only", False):
        raise ValueError(
            f"the last block of {name} has no text stream, which diffusers' first-block cache "
            "requires; use the recipes speca or taylorseer"
        )


def first_block_cache(kit: Kit) -> FirstBlockCache:
    """The cache of diffusers."""
    return FirstBlockCache()
