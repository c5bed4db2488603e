"""Caches of diffusers, attached for one sampling call.

diffusers decides and reuses; what its hooks leave to their caller is done here: the k-th call of a
step has a state of its own (guidance by two calls), a call with other rows begins a new state, the
hooks learn step, timestep and noise level, and everything is removed after the call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from diffusers.hooks import HookRegistry
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from torch import nn

from mmspec.drafters.forecast.attached import AttachedNetworks, NetworkCall, Statistics
from mmspec.drafters.forecast.compiled import unwrap_compiled
from mmspec.drafters.forecast.features import (
    ForwardOverride,
    is_overridden,
    tensors,
    transformer_blocks,
)
from mmspec.drafters.forecast.steps import SamplerClock, check_finite, networks_of, time_of
from mmspec.drafters.forecast.work import PassWork, count_operations
from mmspec.errors import check_number, format_value


@dataclass(frozen=True)
class SamplerCall:
    """One call of a network, as its cache sees it."""

    state: str  # name of the state that the call belongs to
    step: int
    steps: int  # of the sampling call
    timestep: float  # from 1000 (noise) to 0
    noise: float  # share sigma / (alpha + sigma); t of a flow
    arguments: Mapping[str, Any]


class AttachedCache(Protocol):
    """The hooks of a cache in one network, for one sampling call."""

    @property
    def modules(self) -> Sequence[nn.Module]: ...  # those that may be skipped
    def enter(self, call: SamplerCall) -> None: ...  # before a call
    def reused(self) -> Sequence[bool]: ...  # which of the modules the last call skipped
    def close(self, complete: bool) -> None: ...  # after the last call, before hooks are removed


class DiffusersCache(Protocol):
    """A cache of diffusers with its settings."""

    @property
    def title(self) -> str: ...
    @property
    def hooks(self) -> tuple[str, ...]: ...  # names in the registries of diffusers
    def install(self, network: nn.Module, index: int) -> AttachedCache: ...


def attach_cache(cache: DiffusersCache, pipe: Any) -> AttachedNetworks:
    """Attach a cache to the networks of a pipeline for one call; call the result to detach it.

    Raises ValueError for networks that the cache does not support.
    """
    statistics, clock = Statistics(), SamplerClock(pipe.scheduler)
    networks = networks_of(pipe)

    def one(network: nn.Module) -> CachedNetwork:
        index = next(place for place, other in enumerate(networks) if other is network)
        return CachedNetwork(network, cache, index, clock, statistics)

    return AttachedNetworks.to(networks, one, statistics)


class CachedNetwork:
    """A network with a cache attached; call it to detach."""

    def __init__(
        self,
        network: nn.Module,
        cache: DiffusersCache,
        index: int,
        clock: SamplerClock,
        statistics: Statistics,
    ) -> None:
        called, network = network, unwrap_compiled(network)
        if is_overridden(called) or getattr(network, "is_cache_enabled", False):
            raise ValueError(f"{type(network).__name__} already has a cache; remove it first")
        self.statistics, self._clock, self._network = statistics, clock, network
        self._cache, self._signature = cache, inspect.signature(network.forward)
        self._step, self._ordinal = -1, 0  # of the last call
        # operations of a pass, and those within each module, by state
        self._work: dict[str, tuple[int, dict[nn.Module, int]]] = {}
        self._is_compiled = called is not network or any(
            one._compiled_call_impl is not None for one in network.modules()
        )
        self._owned = [(module, set(vars(module))) for module in network.modules()]
        self._attached = cache.install(network, index)
        self._registry = HookRegistry.check_if_exists_or_initialize(network)
        self._registry.invalidate_child_registries_cache()
        self._overrides = ForwardOverride(called, self._call)

    def __call__(self) -> None:
        """Restore the network."""
        self._overrides.restore()
        self._attached.close(self._clock.is_complete)
        for hook in self._cache.hooks:
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
        rows = len(tensors(next(iter(arguments.values())))[0])
        state, clock = f"{self._ordinal} x{rows}", self._clock
        call = SamplerCall(state, step, clock.steps, clock.timestep, clock.noise, arguments)
        context = CacheContext(
            call.state, step_index=step, sigma=call.noise, num_inference_steps=call.steps
        )
        _set_cache_context(self._network, context)
        self._attached.enter(call)
        try:
            output = self._run(partial(original, *args, **kwargs), call.state)
        except (TypeError, LookupError, ValueError) as error:  # of the hooks of diffusers
            raise ValueError(
                f"{self._cache.title} does not support {type(self._network).__name__} as this "
                f"pipeline calls it ({error}); use the recipe taylorseer or speca"
            ) from error
        check_finite(output, step)
        self._count(call.state, start)
        return output

    def _run(self, call: Callable[[], Any], state: str) -> Any:
        """The network's output; the first pass, which is in full, is counted unless compiled."""
        if self._is_compiled or state in self._work:
            return call()
        output, whole, inside = count_operations(call, self._attached.modules)
        self._work[state] = (whole, inside)
        return output

    def _count(self, state: str, start: float) -> None:
        """A pass that reuses anything counts as a forecast."""
        modules, reused = self._attached.modules, self._attached.reused()
        is_full, spent = not any(reused), perf_counter() - start
        seconds = (0.0, spent) if is_full else (spent, 0.0)
        made = ((not is_full,), (is_full,), (None,), None)
        self.statistics.add_call(NetworkCall(*made, start, seconds))
        if state in self._work:
            whole, inside = self._work[state]
            skipped = sum(
                inside[one] for one, is_reused in zip(modules, reused, strict=True) if is_reused
            )
            self.statistics.add_work(
                PassWork((whole - skipped) / whole), is_full, not is_full, False
            )


def check_blocks(network: nn.Module, title: str, least: int = 2) -> list[nn.Module]:
    """The transformer blocks of a network. Raises ValueError where the cache cannot take them."""
    blocks, name = transformer_blocks(network), type(network).__name__
    if len(blocks) < least:
        instead = "taylorseer" if blocks else "deep-cache, if it is a U-Net"
        raise ValueError(
            f"{name} has {len(blocks)} transformer blocks, and {title} needs {least}; use the "
            f"recipe {instead}"
        )
    for kind in {type(block) for block in blocks}:
        try:
            TransformerBlockRegistry.get(kind)
        except ValueError:
            raise ValueError(
                f"{title} does not know the {kind.__name__} of {name}; use the recipe taylorseer "
                "or speca"
            ) from None
    return blocks


def check_streams(network: nn.Module, blocks: Sequence[nn.Module], title: str) -> None:
    """Raises ValueError where the last block drops a stream that the cache reads from it."""
    if getattr(blocks[-1], "context_pre_only", False):
        raise ValueError(
            f"the last block of {type(network).__name__} has no text stream, which {title} "
            "requires; use the recipes speca or taylorseer"
        )


def check_lists(name: str, lists: Sequence[Any], attached: AttachedNetworks) -> None:
    """Note whether the lists of the networks are measured in this call.

    Raises ValueError, and detaches, if there are some, but not one for each network.
    """
    if lists and len(lists) != len(attached.each):
        attached()
        raise ValueError(
            f"{name}= has lists for {len(lists)} networks, but this pipeline has "
            f"{len(attached.each)}; give one list for each, or drop {name}= to measure them"
        )
    attached.statistics.measures = not lists


def is_measured(lists: Sequence[Sequence[float]]) -> bool:
    """Whether there are numbers for every network."""
    return bool(lists) and all(lists)


def forget_unmeasured(lists: list[list[float]]) -> None:
    """Forget what a call has measured that was too short for one network, whose list is empty."""
    if not is_measured(lists):
        lists.clear()


def parse_lists(name: str, given: Any, purpose: str, least: float = -math.inf) -> list[list[float]]:
    """An option with a list of numbers for each network; a single list is that of one network.

    Raises ValueError for anything else.
    """
    lists = given if isinstance(given, list | tuple) else [given]
    nested = [list(one) if isinstance(one, list | tuple) else one for one in lists]
    nested = nested if nested and all(isinstance(one, list) for one in nested) else [nested]
    if not all(nested):
        raise ValueError(
            f"{name}={format_value(given)} has an empty list; give one number for each, or drop "
            f"{name}= {purpose}"
        )
    for one in (value for part in nested for value in part):
        check_number(name, one, least, example=1.0)
    return nested


def hook_of(module: nn.Module, name: str) -> Any:
    """The hook of a cache on a module; None if it has none."""
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(name)
