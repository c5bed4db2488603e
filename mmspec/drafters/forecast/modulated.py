"""TeaCache: the residual of all blocks is reused while the modulated input hardly changes.

Liu et al. 2025 (arXiv 2411.19108). The indicator is the noisy input of the first block after its
modulation by the timestep, which is what its attention reads. Its relative change from step to
step, rescaled by a polynomial into the expected change of the output, is accumulated, and a full
step begins once the sum reaches a threshold. diffusers has no such cache: its hooks for SeaCache
skip the blocks and reuse the residual, and decide by the indicator of TeaCache. Lossy; one decision
for the whole batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from diffusers.hooks import SeaCacheConfig, apply_sea_cache
from diffusers.hooks.sea_cache import _SEA_CACHE_LEADER_BLOCK_HOOK, _SEA_CACHE_ROOT_HOOK
from torch import Tensor, nn

from mmspec.drafters.forecast.attached import AttachedNetworks
from mmspec.drafters.forecast.cached import (
    SamplerCall,
    attach_cache,
    check_blocks,
    check_lists,
    check_streams,
    forget_unmeasured,
    hook_of,
    is_measured,
    parse_lists,
)
from mmspec.drafters.forecast.compiled import unwrap_compiled
from mmspec.drafters.forecast.features import attention_layers
from mmspec.drafters.forecast.spectral import SEA_CACHE_HOOKS, AccumulatedChange
from mmspec.drafters.forecast.steps import networks_of
from mmspec.recipe import Kit

log = logging.getLogger("mmspec")

FIT = "fit"
PUBLISHED: Mapping[str, Sequence[float]] = {  # of the authors' code, highest power first
    "FluxTransformer2DModel": (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861),
    "HunyuanVideoTransformer3DModel": (
        *(733.226126, -401.131952, 67.5869174, -3.149878, 0.0961237896),
    ),
    "LTXVideoTransformer3DModel": (
        *(21.4700694, -12.8016453, 2.31279151, 0.792487521, 0.00969274326),
    ),
    "MochiTransformer3DModel": (
        *(-3512.41319, 811.675948, -60.9400215, 2.42429681, 0.00305291719),
    ),
}
_DEGREE, _POINTS = 4, 4  # highest degree of a fit, and points for each power


@dataclass(frozen=True)
class ModulatedCache:
    """The recipe's architecture; `coefficients` of each network, empty until measured."""

    gate: AccumulatedChange | None = None
    coefficients: list[list[float]] = field(default_factory=list)
    least_steps: ClassVar[int] = _POINTS + 1  # of a call that measures
    title: ClassVar[str] = "TeaCache by the hooks of diffusers"
    hooks: ClassVar[tuple[str, ...]] = SEA_CACHE_HOOKS

    def under(self, gate: object) -> ModulatedCache:
        """Bind to a verifier. Raises ValueError for one that judges something else."""
        if not isinstance(gate, AccumulatedChange):
            raise ValueError(
                f"{type(gate).__name__} does not judge accumulated changes; give verifier= an "
                "AccumulatedChangeGate"
            )
        return ModulatedCache(gate, self.coefficients)

    @property
    def measured(self) -> Mapping[str, Any]:
        """Options that a call has measured; empty before."""
        return {"coefficients": self.coefficients} if is_measured(self.coefficients) else {}

    def attach(self, pipe: Any, samples: int | None = None) -> AttachedNetworks:
        """Attach the cache to the pipeline's networks for one call; call the result to detach it.

        Raises ValueError for networks that the hooks of diffusers do not support.
        """
        forget_unmeasured(self.coefficients)
        attached = attach_cache(self, pipe)
        check_lists("coefficients", self.coefficients, attached)
        return attached

    def install(self, network: nn.Module, index: int) -> ModulatedHooks:
        """Register the hooks of diffusers."""
        blocks = check_blocks(network, self.title)
        check_streams(network, blocks, self.title)
        gate, states = self.gate, list[Tensor]()
        assert gate is not None
        config = SeaCacheConfig(
            gate.change,
            residual_order=0,
            retention_steps=gate.warm_up,
            max_consecutive_cached=gate.most,
            raw_vision_callback=lambda *given: states,
        )
        apply_sea_cache(network, config)
        attention = attention_layers(blocks[0])
        if not attention or hook_of(blocks[0], _SEA_CACHE_LEADER_BLOCK_HOOK) is None:
            raise ValueError(
                f"{self.title} cannot read the modulated input of a {type(blocks[0]).__name__}; "
                "use the recipe sea-cache"
            )
        return ModulatedHooks(network, blocks, attention[0], states, self.coefficients, index)


@dataclass
class _Change:
    """What a state remembers of its last call while coefficients are measured."""

    output: Tensor  # of the last block
    inputs: list[float] = field(default_factory=list)  # relative changes, by step
    outputs: list[float] = field(default_factory=list)


class _Reached(Exception):
    """Ends the first block where its attention has received the modulated input."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


class ModulatedHooks:
    """The hooks in one network."""

    def __init__(
        self,
        network: nn.Module,
        blocks: Sequence[nn.Module],
        attention: nn.Module,
        states: list[Tensor],
        coefficients: list[list[float]],
        index: int,
    ) -> None:
        self.modules, self._attention, self._states = blocks, attention, states
        self._coefficients, self._index = coefficients, index
        self._polynomial = np.poly1d(coefficients[index]) if index < len(coefficients) else None
        self._leader = hook_of(blocks[0], _SEA_CACHE_LEADER_BLOCK_HOOK)
        self._root = hook_of(network, _SEA_CACHE_ROOT_HOOK)
        self._given: tuple[Any, Any] = ((), {})  # arguments of the first block
        self._change = 0.0  # of the modulated input, in the call in progress
        self._measured: dict[str, _Change] = {}
        self._handle = blocks[0].register_forward_pre_hook(self._keep_inputs, with_kwargs=True)
        self._leader._build_indicator = self._read_modulated
        self._leader.shared_state.resolve_gate = self._needs_full_step

    def enter(self, call: SamplerCall) -> None:
        """Show a tensor to the root hook, which would not let the cache act without one."""
        self._states[:] = [value for value in call.arguments.values() if isinstance(value, Tensor)]

    def reused(self) -> Sequence[bool]:
        state = self._root.state_manager.get_state()
        if self._polynomial is None:
            self._measure(self._root.state_manager.context.name, state)
        return [state.consecutive_cached > 0] * len(self.modules)

    def close(self, complete: bool) -> None:
        """Fit the polynomial to what was measured, if the sampling call reached its end."""
        self._handle.remove()
        if self._polynomial is not None or not complete:
            return
        first = next(iter(self._measured.values()), None)
        if first is None or len(first.outputs) < _POINTS:
            self._coefficients.insert(0, [])
            return
        self._coefficients.insert(0, fit_change(first.inputs, first.outputs))  # closed in reverse
        if self._index or not is_measured(self._coefficients):
            return
        log.warning(
            "'tea-cache' computed every step of this call, to measure the network; later calls "
            "skip steps. To skip in the first call too, give coefficients=%s",
            self._coefficients if len(self._coefficients) > 1 else self._coefficients[0],
        )

    def _keep_inputs(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._given = (args, kwargs)

    def _read_modulated(self, metadata: Any) -> list[Tensor]:
        """The input of the first block's attention, by that block up to there."""
        args, kwargs = self._given
        with _stop_at(self._attention):
            try:
                self._leader.fn_ref.original_forward(*args, **kwargs)
            except _Reached as reached:
                return [reached.states]
        raise AssertionError("the first block does not call its attention")

    def _needs_full_step(self, state: Any, metadata: Any, indicator: Any, config: Any) -> bool:
        """The decision of TeaCache, in place of SeaCache's."""
        previous, state.previous_indicator = state.previous_indicator, indicator
        self._change = 0.0 if previous is None else _relative_change(indicator[0], previous[0])
        step, most = metadata.step_index, config.max_consecutive_cached
        if (
            self._polynomial is None
            or previous is None
            or step < config.retention_steps
            or step >= metadata.num_inference_steps - config.cache_end_steps
            or (most and state.consecutive_cached >= most)
        ):
            state.accumulated_distance = 0.0
            return True
        state.accumulated_distance += max(float(self._polynomial(self._change)), 0.0)
        is_full: bool = state.accumulated_distance >= config.threshold
        if is_full:
            state.accumulated_distance = 0.0
        return is_full

    def _measure(self, name: str, state: Any) -> None:
        """Keep the changes of this step, whose blocks were computed."""
        output = self._given_states() + state.history[-1][-1]
        last = self._measured.setdefault(name, _Change(output))
        if last.output is not output:
            last.inputs.append(self._change)
            last.outputs.append(_relative_change(output, last.output))
            last.output = output

    def _given_states(self) -> Tensor:
        """The input of the first block, to which the residual of all blocks is relative."""
        args, kwargs = self._given
        found: Tensor = self._leader._metadata._get_parameter_from_args_kwargs(
            self._leader._metadata.hidden_states_argument_name, args, kwargs
        )
        return found


def find_published(pipe: Any) -> list[list[float]]:
    """The authors' coefficients of the networks of a pipeline; none if one has none."""
    classes = [type(unwrap_compiled(network)).__name__ for network in networks_of(pipe)]
    known = [PUBLISHED.get(name) for name in classes]
    return [list(one) for one in known if one and all(known)]


def fit_change(inputs: Sequence[float], outputs: Sequence[float]) -> list[float]:
    """Coefficients, highest power first, of the change of the output over that of the input.

    The degree is 4 as in the paper, and lower where there are fewer than 16 points.
    """
    degree = min(_DEGREE, max(1, len(inputs) // _POINTS))
    return [round(float(one), 6) for one in np.polyfit(inputs, outputs, degree)]


@contextmanager
def _stop_at(attention: nn.Module) -> Iterator[None]:
    """Stop a block at its attention layer, within the block of this statement."""

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Reached((args[0] if args else kwargs["hidden_states"]).detach())

    handle = attention.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _relative_change(states: Tensor, before: Tensor) -> float:
    """mean |a - b| / mean |b|."""
    change = (states.float() - before.float()).abs().mean() / before.float().abs().mean()
    return float(change)


def modulated_cache(kit: Kit) -> ModulatedCache:
    """The option `coefficients`: None, "fit", one list, or one for each network."""
    given: Any = kit.options["coefficients"]
    if given is None:
        return ModulatedCache(coefficients=find_published(kit.target))
    if given == FIT:
        return ModulatedCache()
    return ModulatedCache(coefficients=parse_lists("coefficients", given, "to measure them"))
