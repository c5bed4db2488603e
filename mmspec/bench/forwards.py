"""Record and replay the forwards of a run, to measure the time that the models alone need.

Forward hooks record every outermost module call: its tensors, and the cache slots it wrote.
`replay` makes the same calls with the same tensors and nothing in between: no masks are built,
nothing is sampled, verified or read back. That time over the wall time of the run is the engine
efficiency; the rest is overhead. Modules are found by walking the attributes of the runner.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from mmspec import _hf_cache
from mmspec.bench.reporting import read_clock
from mmspec.targets.attention_kernels import UNPLANNED
from mmspec.targets.cache import SlotCache

_LIBRARIES = frozenset(
    ("builtins", "torch", "transformers", "diffusers", "tokenizers", "numpy", "PIL")
)


@dataclass(frozen=True)
class Forward:
    """One outermost module call with copies of its tensors; `plan` holds its cache slots."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: int | None = None  # index among the tape's caches
    plan: tuple[Any, ...] = ()  # start, view, slots, rows
    is_first: bool = False  # the first call with its cache: a prompt
    cache_name: str = ""  # its argument


@dataclass
class Tape:
    """The forwards of one run, in order, and the caches they wrote to."""

    forwards: list[Forward] = field(default_factory=list)
    caches: list[tuple[Cache, Cache]] = field(default_factory=list)  # and their initial copies

    def index(self, cache: Cache) -> tuple[int, bool]:
        """Return the index of a cache, and whether it is new."""
        for index, (known, _) in enumerate(self.caches):
            if known is cache:
                return index, False
        self.caches.append((cache, copy.deepcopy(cache)))
        return len(self.caches) - 1, True

    @property
    def prompts(self) -> int:
        """Number of forwards up to the last one that reads a prompt."""
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
def record_forwards(part: Any) -> Iterator[Tape]:
    """Record every forward that `part` (a runner, an accelerated model) makes."""
    tape = Tape()

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = next((one for one in _hf_cache.CACHE_NAMES if kwargs.get(one) is not None), "")
        given = {key: _copy(value) for key, value in kwargs.items() if key != name}
        cache = kwargs.get(name)
        if cache is None:
            tape.forwards.append(Forward(module, _copy(args), given))
            return
        index, is_first = tape.index(cache)
        plan = _slot_cache(cache).plan
        written = (plan.start, plan.view, plan.slots, plan.rows)
        made = Forward(module, _copy(args), given, index, written, is_first, name)
        tape.forwards.append(made)

    with _hook_outermost(part, record, lambda: None):
        yield tape


@contextmanager
def time_forwards(part: Any, device: torch.device) -> Iterator[list[float]]:
    """Collect the seconds of every forward."""
    spent, started = list[float](), [0.0]

    def start(*_: Any) -> None:
        started[0] = read_clock(device)

    with _hook_outermost(part, start, lambda: spent.append(read_clock(device) - started[0])):
        yield spent


@torch.no_grad()
def replay(tape: Tape, device: torch.device) -> Replay:
    """Repeat the recorded calls on fresh caches, as fast as possible."""
    caches = [_copy_cache(*pair) for pair in tape.caches]
    calls = [_bind_call(call, caches) for call in tape.forwards]
    prompts = tape.prompts
    start = read_clock(device)
    for call in calls[:prompts]:
        call()
    middle = read_clock(device)
    with UNPLANNED if tape.caches else nullcontext():  # as in the loop
        for call in calls[prompts:]:
            call()
    return Replay(middle - start, read_clock(device) - middle)


def find_modules(part: Any, seen: set[int] | None = None) -> list[nn.Module]:
    """Find all modules in an object, recursively; in library objects only direct attributes."""
    seen = set() if seen is None else seen
    if id(part) in seen or isinstance(part, Tensor | type | str | int | float | None):
        return []
    seen.add(id(part))
    if isinstance(part, nn.Module):
        return list(part.modules())
    return [found for inner in _children(part) for found in find_modules(inner, seen)]


def _children(part: Any) -> Sequence[Any]:
    if isinstance(part, list | tuple):
        return part
    if isinstance(part, dict):
        return list(part.values())
    values = list(vars(part).values()) if hasattr(part, "__dict__") else []
    if type(part).__module__.partition(".")[0] in _LIBRARIES:
        return [value for value in values if isinstance(value, nn.Module)]
    return values


@contextmanager
def _hook_outermost(
    part: Any, begin: Callable[..., None], end: Callable[[], None]
) -> Iterator[None]:
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

    for module in find_modules(part):
        if id(module._forward_pre_hooks) in hooked:  # copies share their hooks
            continue
        hooked.add(id(module._forward_pre_hooks))
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _slot_cache(cache: Cache) -> SlotCache:
    """Return the cache of the decoder; an encoder's is written once."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    assert isinstance(own, SlotCache)
    return own


def _copy_cache(cache: Cache, first: Cache) -> Cache:
    """Copy the initial state of a cache, with the capacity of its final one."""
    made = copy.deepcopy(first)
    _slot_cache(made).plan.capacity = _slot_cache(cache).plan.capacity
    return made


def _bind_call(call: Forward, caches: Sequence[Cache]) -> Callable[[], Any]:
    if call.cache is None:
        return lambda: call.module(*call.args, **call.kwargs)
    cache = caches[call.cache]
    arguments = {**call.kwargs, call.cache_name: cache}

    def run() -> Any:
        plan = _slot_cache(cache).plan
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
