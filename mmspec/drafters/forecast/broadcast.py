"""Pyramid attention broadcast of diffusers: outputs of attention are reused for some steps.

Zhao et al. 2024 (arXiv 2408.12588). Spatial, temporal and cross attention are each computed in one
step of so many; everything else is computed in every step. Lossy, without a measure of its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from diffusers.hooks import PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast
from diffusers.hooks.pyramid_attention_broadcast import (
    _PYRAMID_ATTENTION_BROADCAST_HOOK,
    PyramidAttentionBroadcastState,
)
from torch import nn

from mmspec.drafters.forecast.attached import AttachedNetworks
from mmspec.drafters.forecast.cached import SamplerCall, attach_cache, hook_of
from mmspec.recipe import Kit


@runtime_checkable
class BroadcastRanges(Protocol):
    """The verifier: how many steps share an output (`verifiers.cached_steps`)."""

    @property
    def spatial(self) -> int: ...
    @property
    def temporal(self) -> int: ...
    @property
    def cross(self) -> int: ...
    @property
    def begin(self) -> float: ...
    @property
    def end(self) -> float: ...


@dataclass(frozen=True)
class AttentionBroadcast:
    """The recipe's architecture; `under` binds it to its ranges."""

    gate: BroadcastRanges | None = None
    title: ClassVar[str] = "diffusers' pyramid attention broadcast"
    hooks: ClassVar[tuple[str, ...]] = (_PYRAMID_ATTENTION_BROADCAST_HOOK,)

    def under(self, gate: object) -> AttentionBroadcast:
        """Bind to a verifier. Raises ValueError for one that judges something else."""
        if not isinstance(gate, BroadcastRanges):
            raise ValueError(
                f"{type(gate).__name__} has no ranges of attention; give verifier= a BroadcastGate"
            )
        return AttentionBroadcast(gate)

    def attach(self, pipe: Any, samples: int | None = None) -> AttachedNetworks:
        """Attach the cache to the pipeline's networks for one call; call the result to detach it.

        Raises ValueError for networks that the cache of diffusers does not support.
        """
        return attach_cache(self, pipe)

    def install(self, network: nn.Module, index: int) -> BroadcastHooks:
        """Register the hooks of diffusers."""
        gate, hooks = self.gate, BroadcastHooks()
        assert gate is not None
        span = (gate.end, gate.begin)  # timesteps fall
        config = PyramidAttentionBroadcastConfig(
            **{f"{kind}_attention_timestep_skip_range": span for kind in _KINDS},
            **{f"{kind}_attention_block_skip_range": getattr(gate, kind) for kind in _KINDS},
            current_timestep_callback=lambda: hooks.timestep,
        )
        apply_pyramid_attention_broadcast(network, config)
        for module in network.modules():
            hook = hook_of(module, _PYRAMID_ATTENTION_BROADCAST_HOOK)
            if hook is not None:
                hooks.add(module, hook)
        if not hooks.modules:
            raise ValueError(
                f"{self.title} finds no attention layer in {type(network).__name__}; use the "
                "recipe taylorseer with lite=True"
            )
        return hooks


@dataclass
class BroadcastHooks:
    """The hooks in one network. Those of diffusers have one state, so it is exchanged per call."""

    modules: list[nn.Module] = field(default_factory=list)
    each: list[Any] = field(default_factory=list)  # PyramidAttentionBroadcastHook
    timestep: float = 1000.0  # of the call in progress
    _states: dict[str, list[PyramidAttentionBroadcastState]] = field(default_factory=dict)
    _originals: list[Callable[..., Any]] = field(default_factory=list)
    _computed: set[int] = field(default_factory=set)  # hooks that computed in the last call

    def add(self, module: nn.Module, hook: Any) -> None:
        """Follow a hook: note whenever it computes its layer."""
        original, place = hook.fn_ref.original_forward, len(self.each)
        self.modules.append(module)
        self.each.append(hook)
        self._originals.append(original)

        def compute(*args: Any, **kwargs: Any) -> Any:
            if place in self._computed:
                raise ValueError(
                    f"a {type(module).__name__} of this network is called twice in a step, and "
                    "pyramid attention broadcast keeps one output; use the recipe taylorseer"
                )
            self._computed.add(place)
            return original(*args, **kwargs)

        hook.fn_ref.original_forward = compute

    def enter(self, call: SamplerCall) -> None:
        """Give the hooks the timestep and the state of this call."""
        self.timestep = call.timestep
        self._computed.clear()
        if call.state not in self._states:
            self._states[call.state] = [PyramidAttentionBroadcastState() for _ in self.each]
        for hook, state in zip(self.each, self._states[call.state], strict=True):
            hook.state = state

    def reused(self) -> Sequence[bool]:
        return [place not in self._computed for place in range(len(self.each))]

    def close(self, complete: bool) -> None:
        for hook, original in zip(self.each, self._originals, strict=True):
            hook.fn_ref.original_forward = original


_KINDS = ("spatial", "temporal", "cross")


def attention_broadcast(kit: Kit) -> AttentionBroadcast:
    """The broadcast of diffusers."""
    return AttentionBroadcast()
