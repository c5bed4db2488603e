"""Functions of tensors that run as graphs of `torch.compile`: `accelerate(model, compile=True)`.

A function is compiled at its first call, and the result of that call is compared with the eager
one. What fails or differs is refused with a reason, and runs eager from then on.

The guards of a compiled decoder (a type, a hook list and a flag for every module) cost up to half
as much as its forward. Only those of the arguments are evaluated in every call;
`ModuleFingerprint` compares the modules once per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_flatten, tree_unflatten

from mmspec.errors import first_line
from mmspec.stats import CompileLog
from mmspec.targets.readers.hooks import list_modules

EAGER = "none"
Function = Callable[..., Sequence[Tensor]]


def parse_backend(option: bool | str) -> str:
    """The backend of torch.compile that `compile=` asks for, if it is not False.

    Raises ValueError for anything but True and a known name.
    """
    if option is True:
        return "inductor"
    if option == "cudagraphs":
        raise ValueError(
            "compile='cudagraphs' fails at a second size of its inputs; give True, which runs CUDA "
            "graphs of compiled kernels"
        )
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
    of `torch.compile`, or `EAGER`: the functions as they are. Functions that run Python of their
    own between the modules are traced first: by `trace`, or another `tracer`.
    """

    def __init__(
        self,
        name: str,
        log: CompileLog,
        backend: str,
        part: str,
        forwards: int = 1,
        tracer: Callable[[Function, Sequence[Any]], nn.Module] | None = None,
    ) -> None:
        self.name, self.log, self.backend, self.part = name, log, backend, part
        self.forwards, self.tracer = forwards, tracer  # of models, in one graph
        self.graphs: dict[Any, Function] = {}
        self.modules = ModuleFingerprint(())
        self.version = 0  # number of times that all were dropped
        self.is_refused = False

    def follow(self, found: ModuleFingerprint) -> None:
        """Compile anew if the modules that the functions run have changed; once per request."""
        if found != self.modules:
            self.modules = found
            self.clear()

    def clear(self) -> None:
        """Compile everything anew."""
        self.version += 1
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
        graph, counted = self.graphs.get(key), count_graphs()
        is_new = graph is None
        try:
            if graph is None:
                graph = self._compile(make(), inputs, symbolic)
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
        self.log.count(self.part, self.forwards)
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

    def _compile(
        self,
        function: Any,
        inputs: Sequence[Any],
        symbolic: Callable[[], Iterable[tuple[Tensor, int]]],
    ) -> Function:
        if self.backend == EAGER:
            return function  # type: ignore[no-any-return]
        for tensor, axis in symbolic():
            torch._dynamo.mark_dynamic(tensor, axis)
        options: dict[str, Any] = {"guard_filter_fn": keep_argument_guards}
        if self.backend == "inductor" and torch.cuda.is_available():
            options |= torch._inductor.list_mode_options("reduce-overhead")
        compile = partial(torch.compile, fullgraph=True, backend=self.backend, options=options)
        if self.tracer is not None:
            return _call_flat(compile(self.tracer(function, inputs)))
        # torch keeps graphs, and limits their number, by code object: each has one of its own
        name = f"{function.__name__}_{len(self.graphs)}"
        function.__code__ = function.__code__.replace(co_name=name)
        compiled: Function = compile(function)
        return compiled


def trace(function: Function, inputs: Sequence[Any], reads_constants: bool = False) -> nn.Module:
    """The tensor operations of a function, as a module of the tensors in its (nested) inputs.

    Everything else is taken as it is at this call. Python of any kind may run, but raises where it
    reads a value from the device: so a graph never does. With `reads_constants` it may read those
    that do not depend on the inputs, which become constants. Axes marked by `mark_dynamic` are of
    any size. Constants that the function keeps (`lru_cache`) have to exist: call it once before.
    """
    leaves, layout = tree_flatten(list(inputs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def run(*tensors: Tensor) -> list[Tensor]:
        own = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            own[place] = tensor
        return list(function(*tree_unflatten(own, layout)))

    fake = []
    for place in places:
        leaf = leaves[place]
        marked = getattr(leaf, "_dynamo_dynamic_indices", ())
        kinds = (DimDynamic.STATIC, DimDynamic.DYNAMIC)
        sizes = [kinds[axis in marked] for axis in range(leaf.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        source = ConstantSource(f"input_{place}")
        fake.append(mode.from_tensor(leaf, source=source, symbolic_context=context))
    # outside the mode, operations on other tensors than the inputs give real ones; where C++ takes
    # `linear` apart, torch 2.11 writes the sizes of this call into the graph, Python does not
    with nullcontext() if reads_constants else mode, enable_python_dispatcher():
        return make_fx(run, _error_on_data_dependent_ops=not reads_constants)(*fake)


def _call_flat(compiled: Callable[..., Sequence[Tensor]]) -> Function:
    def call(*inputs: Any) -> Sequence[Tensor]:
        leaves, _ = tree_flatten(list(inputs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return compiled(*tensors)

    return call


def keep_argument_guards(guards: Sequence[Any]) -> list[bool]:
    """Which guards are evaluated in every call: those of arguments, shapes and torch's settings."""
    return [
        guard.guard_type in _SETTINGS
        or not (guard.is_global or guard.orig_guard.source.name.endswith("NN_MODULE"))
        for guard in guards
    ]


_SETTINGS = ("SHAPE_ENV", "GRAD_MODE", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE")


class ModuleFingerprint:
    """What compiled code depends on in modules: their identity, mode, parameters and dtypes.

    Also plain attributes, which are constants in a graph: the active adapter and its scale (peft).
    Tensors are inputs of a graph, and read anew in every call.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found: list[Any] = []
        settings: list[Any] = []
        for one in list_modules(modules):
            found += (one, one.training)
            for own in one._parameters.values():
                if own is not None:
                    found += (own, own.dtype)
            for name, value in vars(one).items():
                if name not in _OF_EVERY_MODULE:
                    settings.append(name)
                    settings.append(value if type(value) in _ATOMS else copy_plain(value))
        self.found, self.settings = found, settings

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleFingerprint) or len(self.found) != len(other.found):
            return False
        # tensors have no truth value
        return all(map(is_, self.found, other.found)) and self.settings == other.settings

    __hash__ = None  # type: ignore[assignment]


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # hooks, parameters, submodules
_ATOMS = frozenset((bool, int, float, str, type(None)))


def copy_plain(value: Any) -> Any:
    """A copy of nested numbers, strings and functions; None for other objects."""
    kind = type(value)  # isinstance reads an attribute of others, which takes configurations long
    if kind in _ATOMS or issubclass(kind, (int, float, str)) or callable(value):
        return value
    if issubclass(kind, Mapping):
        return {key: copy_plain(one) for key, one in value.items()}
    if issubclass(kind, (list, tuple)):
        return [copy_plain(one) for one in value]
    return set(value) if issubclass(kind, (set, frozenset)) else None


def count_graphs() -> int:
    """How many graphs torch has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
