"""The forwards of a run, recorded and replayed: the time that the models alone need.

While a run is recorded, PyTorch's forward hooks keep every outermost call of a model, its decoder
or its head: the tensors, and where the cache wrote. `replay` makes the same calls with the same
tensors and nothing in between: no masks are built, nothing is sampled, verified or read back. That
time over the wall time of the run is the engine's efficiency; the rest is our overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.api import Accelerated
from mmspec.bench.environment import seconds
from mmspec.targets.cache import SlotCache
from mmspec.targets.reader import RunsNetworks


@dataclass(frozen=True)
class Forward:
    """One outermost call of a module, its tensors copied; `plan` is where its cache wrote."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: int | None = None  # index among the tape's caches
    plan: tuple[Any, ...] = ()  # start, view, slots, rows
    is_first: bool = False  # the first on its cache: a prompt


@dataclass
class Tape:
    """The forwards of one run, in order, and the caches they wrote to."""

    forwards: list[Forward] = field(default_factory=list)
    caches: list[tuple[SlotCache, Any]] = field(default_factory=list)  # with the model's config

    def index(self, cache: SlotCache, config: Any) -> tuple[int, bool]:
        """The number of a cache, and whether it is new."""
        for index, (known, _) in enumerate(self.caches):
            if known is cache:
                return index, False
        self.caches.append((cache, config))
        return len(self.caches) - 1, True

    @property
    def prompts(self) -> int:
        """Forwards up to the last one that reads a prompt."""
        first = [index for index, call in enumerate(self.forwards) if call.is_first]
        return first[-1] + 1 if first else 0


@dataclass(frozen=True)
class Replay:
    """Seconds of the forwards alone."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


@contextmanager
def recording(fast: Accelerated) -> Iterator[Tape]:
    """Record every forward of an accelerated model, its drafter's models included."""
    tape = Tape()

    def note(
        backbone: RunsNetworks, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        given = {name: _copy(value) for name, value in kwargs.items() if name != "past_key_values"}
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, SlotCache):
            tape.forwards.append(Forward(module, _copy(args), given))
            return
        index, is_first = tape.index(cache, backbone.cache_config)
        plan = (cache.plan.start, cache.plan.view, cache.plan.slots, cache.plan.rows)
        tape.forwards.append(Forward(module, _copy(args), given, index, plan, is_first))

    with _outermost(fast, note, lambda: None):
        yield tape


@contextmanager
def stopwatch(fast: Accelerated) -> Iterator[list[float]]:
    """Note the seconds of every forward while it happens."""
    device, spent, started = fast.session.bound.backbone.device, list[float](), [0.0]

    def start(*_: Any) -> None:
        started[0] = seconds(device)

    with _outermost(fast, start, lambda: spent.append(seconds(device) - started[0])):
        yield spent


@torch.no_grad()
def replay(tape: Tape, device: torch.device) -> Replay:
    """Make the recorded calls again, as fast as they go, on fresh caches."""
    caches = [SlotCache(config, cache.plan.capacity) for cache, config in tape.caches]
    calls = [_bound(call, caches) for call in tape.forwards]
    prompts = tape.prompts
    start = seconds(device)
    for call in calls[:prompts]:
        call()
    middle = seconds(device)
    for call in calls[prompts:]:
        call()
    return Replay(middle - start, seconds(device) - middle)


def backbones(part: Any, seen: set[int] | None = None) -> list[RunsNetworks]:
    """Every backbone within an accelerated model's parts."""
    seen = set() if seen is None else seen
    if id(part) in seen or isinstance(part, nn.Module | Tensor | str | int | float | None):
        return []
    seen.add(id(part))
    if isinstance(part, RunsNetworks):
        return [part]
    return [found for inner in _inner(part) for found in backbones(inner, seen)]


def _inner(part: Any) -> Sequence[Any]:
    if isinstance(part, Accelerated):
        return [part.session.bound.target, part.session.bound.drafter]
    if isinstance(part, list | tuple):
        return part
    if isinstance(part, dict):
        return list(part.values())
    ours = type(part).__module__.startswith("mmspec.")
    return list(vars(part).values()) if ours and hasattr(part, "__dict__") else []


@contextmanager
def _outermost(
    fast: Accelerated, begin: Callable[..., None], end: Callable[[], None]
) -> Iterator[None]:
    """Call `begin(backbone, module, args, kwargs)` and `end()` around outermost forwards."""
    inside, handles, hooked = [0], [], set[int]()

    def hooks(backbone: RunsNetworks) -> tuple[Any, Any]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inside[0] += 1
            if inside[0] == 1:
                begin(backbone, module, args, kwargs)

        def after(*_: Any) -> None:
            inside[0] -= 1
            if not inside[0]:
                end()

        return before, after

    for backbone in backbones(fast):
        for module in backbone.networks:
            if id(module._forward_pre_hooks) in hooked:  # thinner copies share their hooks
                continue
            hooked.add(id(module._forward_pre_hooks))
            before, after = hooks(backbone)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bound(call: Forward, caches: Sequence[SlotCache]) -> Callable[[], Any]:
    if call.cache is None:
        return lambda: call.module(*call.args, **call.kwargs)
    cache = caches[call.cache]
    arguments = {**call.kwargs, "past_key_values": cache}

    def run() -> Any:
        plan = cache.plan
        plan.start, plan.view, plan.slots, plan.rows = call.plan
        return call.module(*call.args, **arguments)

    return run


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple | list):
        return type(value)(_copy(inner) for inner in value)
    if isinstance(value, dict):
        return {name: _copy(inner) for name, inner in value.items()}
    return value
