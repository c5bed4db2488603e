"""The work of a pass through a network, and the part of it that forecasts skip.

Work is counted in floating-point operations of matrix products, convolutions and attention, during
one pass computed in full; norms and activations do not count. What the layers that are forecast
would compute is counted separately, so layers that a network hides from forecasts show up as work
that is not skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ATTENTION = "_scaled_dot_product"  # the kernels of torch, each with its own operation


@dataclass(frozen=True)
class PassWork:
    """Work of the passes of one network, as shares of a pass in full."""

    forecast: float  # of a pass by forecast
    check: float = 0.0  # what a check adds to it


def count_work(
    call: Callable[[], Any], skipped: Sequence[nn.Module], checked: nn.Module | None = None
) -> tuple[Any, PassWork]:
    """The output of a pass in full, and the work if some modules are skipped and one is checked."""
    output, whole, inside = count_operations(
        call, (*skipped, *(() if checked is None else (checked,)))
    )
    rest = whole - sum(inside[module] for module in skipped)
    return output, PassWork(rest / whole, 0.0 if checked is None else inside[checked] / whole)


def count_operations(
    call: Callable[[], Any], modules: Sequence[nn.Module]
) -> tuple[Any, int, dict[nn.Module, int]]:
    """The output of a pass in full, its operations, and those within each module."""
    counter, inside = FlopCounter(), dict.fromkeys(modules, 0)
    with _count_by_module(counter, inside), counter:
        output = call()
    return output, counter.total or 1, inside


@contextmanager
def _count_by_module(counter: FlopCounter, inside: dict[nn.Module, int]) -> Iterator[None]:
    """Add the work within each module to `inside`, that of nested ones included."""
    entered: list[int] = []

    def enter(module: nn.Module, given: Any) -> None:
        entered.append(counter.total)

    def leave(module: nn.Module, given: Any, output: Any) -> None:
        inside[module] += counter.total - entered.pop()

    handles = [one.register_forward_pre_hook(enter) for one in inside]
    handles += [one.register_forward_hook(leave) for one in inside]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class FlopCounter(TorchDispatchMode):
    """Counts the floating-point operations of all calls in its context.

    Unlike `torch.utils.flop_counter.FlopCounterMode` it counts attention by its shapes, whatever
    the kernel and the number of key heads, and never refuses an operation.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Networks may compile parts of themselves, whose operations are not counted."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, known = kwargs or {}, _formula(func)
        if known is None and isinstance(func, OpOverload):
            with self:  # in inference mode products arrive as parts of larger operations
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        if known is not None:
            self.total += known(*args, **kwargs, out_val=output)
        return output


def _formula(func: Any) -> Callable[..., int] | None:
    """The formula of an operation: output and arguments to operations; None if it is not known."""
    if not isinstance(func, OpOverload):
        return None
    name = func._schema.name.partition("::")[2]
    if name.startswith(ATTENTION) and "backward" not in name:
        return _attention
    found: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    return found


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Scores and weighted sums: two products per query, key and head of the query."""
    rows = query.numel() // query.shape[-1]  # (B, heads, queries, D), keys (B, heads, keys, D)
    return int(2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
