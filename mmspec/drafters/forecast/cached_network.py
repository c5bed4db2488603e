"""A network under the first-block cache of diffusers, for one call of its pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, apply_first_block_cache
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.first_block_cache import _FBC_BLOCK_HOOK, _FBC_LEADER_BLOCK_HOOK
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from torch import nn

from mmspec.drafters.forecast.compiled import own
from mmspec.drafters.forecast.features import TakenOver, is_taken_over, stacked
from mmspec.drafters.forecast.hooks import Statistics
from mmspec.drafters.forecast.steps import StepClock, check_finite, time_of


class CachedNetwork:
    """Attached when made, given back when called; each call in a step has a state of its own."""

    def __init__(
        self, network: nn.Module, threshold: float, clock: StepClock, statistics: Statistics
    ) -> None:
        called, network = network, own(network)
        blocks = stacked(network)
        _check(called, blocks)
        self.statistics, self._clock, self._network = statistics, clock, network
        self._signature = inspect.signature(network.forward)
        self._step, self._ordinal = -1, 0  # of the last call
        self._owned = [(block, set(vars(block))) for block in (network, *blocks)]
        apply_first_block_cache(network, FirstBlockCacheConfig(threshold))
        self._registry = HookRegistry.check_if_exists_or_initialize(network)
        self._registry.invalidate_child_registries_cache()
        head = HookRegistry.check_if_exists_or_initialize(blocks[0])
        self._shared = head.get_hook(_FBC_LEADER_BLOCK_HOOK).state_manager
        self._taken = TakenOver(called, self._call)

    def __call__(self) -> None:
        """Give the network back as it was."""
        self._taken.restore()
        for hook in (_FBC_LEADER_BLOCK_HOOK, _FBC_BLOCK_HOOK):
            self._registry.remove_hook(hook, recurse=True)
        self._registry.invalidate_child_registries_cache()
        for module, owned in self._owned:
            for name in {"forward", "_diffusers_hook"} & vars(module).keys() - owned:
                delattr(module, name)

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = self._signature.bind(*args, **kwargs).arguments
        step = self._clock.see(time_of(arguments))
        self._ordinal = self._ordinal + 1 if step == self._step else 0
        self._step = step
        _set_cache_context(self._network, CacheContext(str(self._ordinal)))
        try:
            output = original(*args, **kwargs)
        except (TypeError, IndexError) as error:  # of the hooks of diffusers
            raise ValueError(
                f"diffusers' first-block cache does not serve {type(self._network).__name__} as "
                f"this pipeline calls it ({error}); use the recipe taylorseer or speca"
            ) from error
        check_finite(output, step)
        computed = bool(self._shared.get_state().should_compute)
        self.statistics.full += computed
        self.statistics.forecast += not computed
        return output


def _check(network: nn.Module, blocks: list[nn.Module]) -> None:
    name = type(own(network)).__name__
    if len(blocks) < 2:
        raise ValueError(
            f"{name} has {len(blocks)} transformer blocks, and the cache needs two; use the recipe "
            "taylorseer"
        )
    if is_taken_over(network) or getattr(network, "is_cache_enabled", False):
        raise ValueError(f"{name} has a cache already; remove that first")
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
            "takes for granted; use the recipes speca or taylorseer"
        )
