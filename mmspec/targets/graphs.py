"""Functions of tensors that run as graphs of `torch.compile`: `accelerate(model, compile=True)`.

A function is compiled at its first call, and the result of that call is compared with the eager
one. What fails or differs is refused with a reason, and runs eager from then on.

The guards of a compiled decoder (a type, a hook list and a flag for every module) cost up to half
as much as its forward. Only those of the arguments are evaluated in every call;
`ModuleFingerprint` compares the modules once per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.errors import first_line
from mmspec.stats import CompileLog

EAGER = "none"
Function = Callable[..., Sequence[Tensor]]


def parse_backend(option: bool | str) -> str:
    """The backend of torch.compile that `compile=` asks for, if it is not False.

    Raises ValueError for anything but True and a known name.
    """
    if option is True:
        return "inductor"
    known = sorted({"inductor", EAGER, *torch.compiler.list_backends(exclude_tags=())})
    if option not in known:
        raise ValueError(
            f"compile={option!r} must be True, False or a backend of torch.compile; give one of "
            f"{', '.join(known)}"
        )
    return option


class GraphSet:
    """Compiled functions by key.

    `name` is what runs, and `part` of a round it belongs to, as in `CompileLog`. `backend` is one
    of `torch.compile`, or `EAGER`: the functions as they are.
    """

    def __init__(self, name: str, log: CompileLog, backend: str, part: str) -> None:
        self.name, self.log, self.backend, self.part = name, log, backend, part
        self.graphs: dict[Any, Function] = {}
        self.modules = ModuleFingerprint(())
        self.is_refused = False

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Compile anew if the modules that the functions run have changed; once per request."""
        found = ModuleFingerprint(modules)
        if found != self.modules:
            self.modules = found
            self.graphs.clear()

    def run(
        self,
        key: Any,
        make: Callable[[], Function],
        inputs: Sequence[Any],
        symbolic: Callable[[], Iterable[tuple[Tensor, int]]],
        compare: Callable[[Sequence[Tensor]], float | None],
    ) -> Sequence[Tensor] | None:
        """Results of the function of this key; None = run it eager.

        `make` makes it. `symbolic` lists the tensors and axes of `inputs` whose sizes differ
        between calls. `compare` says how far new results are from the eager ones, relative to the
        spread of those; None if no further than rounding.
        """
        graph, is_new = self.graphs.get(key), False
        if graph is None:
            graph, is_new = self._compile(make()), True
            for tensor, axis in symbolic():
                torch._dynamo.mark_dynamic(tensor, axis)
        counted = count_graphs()
        try:
            out = self._call(graph, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a class may fail to compile in any way
            if not is_new:
                raise
            self.refuse(f"torch.compile failed ({first_line(error)})")
            return None
        self.log.graphs += count_graphs() - counted
        if is_new and (gap := compare(out)) is not None:
            self.refuse(f"its scores differ when compiled (by {gap:.2g} of their spread)")
            return None
        self.graphs[key] = graph
        self.log.count(self.part)
        return out

    def refuse(self, reason: str) -> None:
        """Run eager from now on."""
        self.is_refused = True
        self.note(reason)

    def note(self, reason: str) -> None:
        """Note why something runs eager."""
        self.log.refuse(self.name, reason, self.part)

    def _call(self, graph: Function, inputs: Sequence[Any]) -> Sequence[Tensor]:
        if self.backend != "inductor" or inputs[0].device.type != "cuda":
            return graph(*inputs)
        torch.compiler.cudagraph_mark_step_begin()
        # clones, as the next replay writes the same memory
        return [one.clone() for one in graph(*inputs)]

    def _compile(self, function: Any) -> Function:
        if self.backend == EAGER:
            return function  # type: ignore[no-any-return]
        # torch keeps graphs, and limits their number, by code object: each has one of its own
        name = f"{function.__name__}_{len(self.graphs)}"
        function.__code__ = function.__code__.replace(co_name=name)
        options: dict[str, Any] = {"guard_filter_fn": keep_argument_guards}
        if self.backend == "inductor" and torch.cuda.is_available():
            options |= torch._inductor.list_mode_options("reduce-overhead")
        compiled: Function = torch.compile(
            function, fullgraph=True, backend=self.backend, options=options
        )
        return compiled


def keep_argument_guards(guards: Sequence[Any]) -> list[bool]:
    """Which guards are evaluated in every call: those of arguments, shapes and torch's settings."""
    return [
        guard.guard_type in _SETTINGS
        or not (guard.is_global or guard.orig_guard.source.name.endswith("NN_MODULE"))
        for guard in guards
    ]


_SETTINGS = ("SHAPE_ENV", "GRAD_MODE", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE")


class ModuleFingerprint:
    """What compiled code depends on in modules: their identity, mode, parameters and dtypes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found: list[Any] = []
        for module in modules:
            for one in module.modules():
                found += (one, one.training)
                found += ((own, own.dtype) for own in one._parameters.values() if own is not None)
        self.found = found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleFingerprint) or len(self.found) != len(other.found):
            return False
        return all(_is_same(a, b) for a, b in zip(self.found, other.found, strict=True))

    __hash__ = None  # type: ignore[assignment]


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return isinstance(b, tuple) and a[0] is b[0] and a[1] == b[1]
    return a is b


def count_graphs() -> int:
    """How many graphs torch has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
