"""The forwards of a run, recorded and replayed: the time that the models alone need.

While a run is recorded, PyTorch's forward hooks keep every outermost call of a module: the tensors,
and where the cache wrote. `replay` makes the same calls with the same tensors and nothing in
between: no masks are built, nothing is sampled, verified or read back. That time over the wall time
of the run is the engine's efficiency; the rest is our overhead. Which modules there are is not
listed anywhere: they are found in what runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from mmspec.bench.environment import seconds
from mmspec.targets.cache import SlotCache

_LIBRARIES = frozenset(
    ("builtins", "torch", "transformers", "diffusers", "tokenizers", "numpy", "PIL")
)


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
    caches: list[tuple[Cache, Cache]] = field(default_factory=list)  # and as they were at first

    def index(self, cache: Cache) -> tuple[int, bool]:
        """The number of a cache, and whether it is new."""
        for index, (known, _) in enumerate(self.caches):
            if known is cache:
                return index, False
        self.caches.append((cache, copy.deepcopy(cache)))
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
def recording(part: Any) -> Iterator[Tape]:
    """Record every forward of whatever `part` (a contestant, an accelerated model) runs."""
    tape = Tape()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {name: _copy(value) for name, value in kwargs.items() if name != "past_key_values"}
        cache = kwargs.get("past_key_values")
        if cache is None:
            tape.forwards.append(Forward(module, _copy(args), given))
            return
        index, is_first = tape.index(cache)
        plan = _slots(cache).plan
        places = (plan.start, plan.view, plan.slots, plan.rows)
        tape.forwards.append(Forward(module, _copy(args), given, index, places, is_first))

    with _outermost(part, note, lambda: None):
        yield tape


@contextmanager
def stopwatch(part: Any, device: torch.device) -> Iterator[list[float]]:
    """Note the seconds of every forward while it happens."""
    spent, started = list[float](), [0.0]

    def start(*_: Any) -> None:
        started[0] = seconds(device)

    with _outermost(part, start, lambda: spent.append(seconds(device) - started[0])):
        yield spent


@torch.no_grad()
def replay(tape: Tape, device: torch.device) -> Replay:
    """Make the recorded calls again, as fast as they go, on fresh caches."""
    caches = [_fresh(*pair) for pair in tape.caches]
    calls = [_bound(call, caches) for call in tape.forwards]
    prompts = tape.prompts
    start = seconds(device)
    for call in calls[:prompts]:
        call()
    middle = seconds(device)
    for call in calls[prompts:]:
        call()
    return Replay(middle - start, seconds(device) - middle)


def modules(part: Any, seen: set[int] | None = None) -> list[nn.Module]:
    """Every module within a part, theirs included; of an object of a library only its own ones."""
    seen = set() if seen is None else seen
    if id(part) in seen or isinstance(part, Tensor | type | str | int | float | None):
        return []
    seen.add(id(part))
    if isinstance(part, nn.Module):
        return list(part.modules())
    return [found for inner in _inner(part) for found in modules(inner, seen)]


def _inner(part: Any) -> Sequence[Any]:
    if isinstance(part, list | tuple):
        return part
    if isinstance(part, dict):
        return list(part.values())
    values = list(vars(part).values()) if hasattr(part, "__dict__") else []
    if type(part).__module__.partition(".")[0] in _LIBRARIES:
        return [value for value in values if isinstance(value, nn.Module)]
    return values


@contextmanager
def _outermost(part: Any, begin: Callable[..., None], end: Callable[[], None]) -> Iterator[None]:
    """Call `begin(module, args, kwargs)` and `end()` around outermost forwards."""
    inside, handles, hooked = [0], [], set[int]()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside[0] += 1
        if inside[0] == 1:
            begin(module, args, kwargs)

    def after(*_: Any) -> None:
        inside[0] -= 1
        if not inside[0]:
            end()

    for module in modules(part):
        if id(module._forward_pre_hooks) in hooked:  # thinner copies share their hooks
            continue
        hooked.add(id(module._forward_pre_hooks))
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _slots(cache: Cache) -> SlotCache:
    """Where a cache writes what is decoded; an encoder's side is written once."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    assert isinstance(own, SlotCache)
    return own


def _fresh(cache: Cache, first: Cache) -> Cache:
    """A cache as it was before its first forward, with room for what comes."""
    made = copy.deepcopy(first)
    _slots(made).plan.capacity = _slots(cache).plan.capacity
    return made


def _bound(call: Forward, caches: Sequence[Cache]) -> Callable[[], Any]:
    if call.cache is None:
        return lambda: call.module(*call.args, **call.kwargs)
    cache = caches[call.cache]
    arguments = {**call.kwargs, "past_key_values": cache}

    def run() -> Any:
        plan = _slots(cache).plan
        plan.start, plan.view, plan.slots, plan.rows = call.plan
        return call.module(*call.args, **arguments)

    return run


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple | list):
        return type(value)(_copy(inner) for inner in value)
    if isinstance(value, dict):
        return type(value)(**{name: _copy(inner) for name, inner in value.items()})
    return value
