"""DeepCache: the deep levels of a U-Net are reused for some steps, its outer levels computed.

Ma et al. 2024 (arXiv 2312.00858, CVPR). Features of the deep levels change slowly from step to
step. The outermost `depth` levels (down blocks, and the up blocks beside them) are computed in
every step, with the feature that the deep levels gave in the last full step. Lossy, without a
measure of its error; one decision for the whole batch. The paper cuts between the layers of a
block, this between blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import nn

from mmspec.drafters.forecast.attached import AttachedNetworks
from mmspec.drafters.forecast.cached import SamplerCall, attach_cache
from mmspec.drafters.forecast.features import ForwardOverride, rebuild_output, tensors
from mmspec.errors import check_number
from mmspec.recipe import Kit


@runtime_checkable
class StepInterval(Protocol):
    """The verifier: how many steps share their deep features (`verifiers.cached_steps`)."""

    @property
    def interval(self) -> int: ...


@dataclass(frozen=True)
class DeepBlockCache:
    """The recipe's architecture; `under` binds it to an interval.

    Raises ValueError if `depth` is not a number of levels.
    """

    depth: int = 1
    interval: int = 1
    title: ClassVar[str] = "DeepCache"
    hooks: ClassVar[tuple[str, ...]] = ()  # diffusers has none

    def __post_init__(self) -> None:
        check_number("depth", self.depth, 1, whole=True, example=1)

    def under(self, gate: object) -> DeepBlockCache:
        """Bind to a verifier. Raises ValueError for one that judges something else."""
        if not isinstance(gate, StepInterval):
            raise ValueError(
                f"{type(gate).__name__} has no interval of steps; give verifier= an IntervalGate"
            )
        return DeepBlockCache(self.depth, gate.interval)

    def attach(self, pipe: Any, samples: int | None = None) -> AttachedNetworks:
        """Attach the cache to the pipeline's networks for one call; call the result to detach it.

        Raises ValueError for networks that are not U-Nets of more than `depth` levels.
        """
        return attach_cache(self, pipe)

    def install(self, network: nn.Module, index: int) -> DeepBlockHooks:
        """Override the forwards of the deep blocks."""
        return DeepBlockHooks(find_deep_blocks(network, self.depth), self.interval)


def find_deep_blocks(network: nn.Module, depth: int) -> list[nn.Module]:
    """The blocks of a U-Net below its outermost `depth` levels, in execution order.

    Raises ValueError where there are none.
    """
    parts = dict(network.named_children())
    down, middle, up = (parts.get(name) for name in ("down_blocks", "mid_block", "up_blocks"))
    name = type(network).__name__
    if not isinstance(down, nn.ModuleList) or not isinstance(up, nn.ModuleList):
        raise ValueError(
            f"{name} is not a U-Net with down_blocks and up_blocks, which deep-cache requires; use "
            "a cache of transformer blocks, such as sea-cache"
        )
    if any(isinstance(block, nn.ModuleList) for block in (*down, *up)):
        raise ValueError(
            f"{name} calls the layers of its blocks one by one, which deep-cache does not support; "
            "use the recipe taylorseer with lite=True"
        )
    levels = min(len(down), len(up))
    if depth >= levels:
        raise ValueError(
            f"depth={depth} leaves no level of the {levels} of {name} to reuse; give at most "
            f"depth={levels - 1}"
        )
    return [*down[depth:], *([] if middle is None else [middle]), *up[: len(up) - depth]]


@dataclass
class DeepBlockHooks:
    """The overridden blocks of one network."""

    modules: Sequence[nn.Module]
    interval: int
    _kept: dict[str, dict[nn.Module, Any]] = field(default_factory=dict)  # outputs, by state
    _full_steps: dict[str, int] = field(default_factory=dict)  # the last ones, by state
    _state: str = ""  # of the call in progress
    _is_full: bool = True
    _reused: set[nn.Module] = field(default_factory=set)  # in that call
    _overrides: list[ForwardOverride] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._overrides += [ForwardOverride(one, self._body_of(one)) for one in self.modules]

    def _body_of(self, module: nn.Module) -> Callable[..., Any]:
        """Only the output of the last deep block reaches a computed one, which may write into it.

        Other outputs have the right shapes, which are read.
        """
        is_last = module is self.modules[-1]

        def body(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            kept = self._kept[self._state]
            if self._is_full:
                output = original(*args, **kwargs)
                kept[module] = _copy(output) if is_last else output
                return output
            self._reused.add(module)
            return _copy(kept[module]) if is_last else kept[module]

        return body

    def enter(self, call: SamplerCall) -> None:
        """Compute the first step of a state in every interval."""
        last = self._full_steps.get(call.state)
        self._is_full = last is None or call.step // self.interval != last // self.interval
        if self._is_full:
            self._full_steps[call.state] = call.step
        self._state = call.state
        self._kept.setdefault(call.state, {})
        self._reused.clear()

    def reused(self) -> Sequence[bool]:
        return [module in self._reused for module in self.modules]

    def close(self, complete: bool) -> None:
        for override in reversed(self._overrides):
            override.restore()


def _copy(output: Any) -> Any:
    return rebuild_output(output, [part.clone() for part in tensors(output)])


def deep_block_cache(kit: Kit) -> DeepBlockCache:
    """The cache with the option `depth`."""
    return DeepBlockCache(kit.options["depth"])
