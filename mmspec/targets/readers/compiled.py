"""Blocks read by one compiled graph: `accelerate(model, compile=True)`.

The forward of a small block is bound by the interpreter, or by the launches of kernels. Here the
decoder and its output head are one graph of `torch.compile`, captured as a CUDA graph on an
accelerator. Blocks are padded to a few lengths and batches to powers of two; slots, positions and
masks are computed in the graph from a few numbers per row, and keys and values lie in buffers of
fixed capacity (`mmspec.targets.fixed`). A graph is compiled for one token and for several, per
number of rows; its lengths and capacities are symbolic, so none is compiled after these two.

The scores of every new graph are compared with the eager ones. What cannot be compiled runs eager,
and `CompileLog` has the reason.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmspec.errors import first_line
from mmspec.stats import CompileLog
from mmspec.targets.fixed import BlockPlan, BufferStore, FixedCache, FixedSlots, pad
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.readers.backbone import FULL, SLIDING, Backbone
from mmspec.targets.readers.hooks import wanted_layers
from mmspec.targets.readers.reader import Reader, layer_list_name, without_layers
from mmspec.targets.readers.rounding import rounding_margin, score_difference

EAGER = "none"
ROOM = 64  # slots for drafts beside the new tokens of a request
MAX_RESERVED = 1024  # new tokens that a buffer is made for at once
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


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


def compile_readers(target: Any, draft: Any, features: Iterable[str], backend: str) -> CompileLog:
    """Let the reader of a target, and of its draft model, read blocks by compiled graphs.

    `draft` is a reader or a `mmspec.drafters.draft_model.DraftModel`, if there is one; `features`
    are those that the target provides. What cannot be compiled is in the log.
    """
    found = CompileLog()
    recorded = sorted({one for layers in wanted_layers(features).values() for one in layers})
    for reader, layers in ((target, recorded), (draft, ())):
        name = type(reader if reader is None else vars(reader).get("model", reader)).__name__
        if isinstance(reader, Backbone):
            reader.compiled = CompiledBlocks(reader, found, layers, backend)
        elif isinstance(reader, Reader):
            found.refuse(name, "only the blocks of decoders without guidance are compiled")
        elif reader is not None and not reader.compile_blocks(
            partial(BlockGraphs, name, found, backend)
        ):
            found.refuse(name, "it reads no blocks after a cache of its own")
    return found


class BlockGraphs:
    """Compiled functions of padded blocks: per number of rows, for one token and for several.

    `make` returns a function of tokens (R, q), further inputs (R, q, ...), and depths, corner,
    columns, base, offsets and parts as `FixedSlots.place` gives them; its results are (R, q, ...).
    `backend` is one of `torch.compile`, or `EAGER`: the same function without compiling it.
    """

    def __init__(self, name: str, log: CompileLog, backend: str, make: Callable[[], Any]) -> None:
        self.name, self.log, self.backend, self.make = name, log, backend, make
        self.store = BufferStore()
        self.graphs: dict[tuple[int, bool, bool], Callable[..., Any]] = {}
        self.is_refused = False

    def prepare(self, memory: Any, new_tokens: int, obstacle: str | None = None) -> None:
        """Move the memory of a prompt to fixed buffers, if its blocks can be read compiled."""
        if self.is_refused:
            return
        reason = obstacle or FixedSlots.find_obstacle(memory)
        if reason is not None:
            self.log.refuse(self.name, reason)
        else:
            memory.fixed = FixedSlots(memory, self.store, min(new_tokens, MAX_RESERVED) + ROOM)

    def run(
        self,
        memory: Memory,
        block: TokenBlock,
        more: Sequence[Tensor],
        run_eager: Callable[[], Tensor],
    ) -> Sequence[Tensor] | None:
        """Results (B, q, ...) of a block and `more` inputs (B, q, ...); None = run it eager.

        `run_eager` returns the last of `block`'s scores, which those of a new graph are compared
        with.
        """
        if self.is_refused or block.embeds is not None or torch.is_grad_enabled():
            return None
        fixed = memory.fixed
        if not fixed.is_current(memory):  # rows joined or left
            if FixedSlots.find_obstacle(memory) is not None:
                return None
            fixed = memory.fixed = FixedSlots(memory, self.store, ROOM)
        tokens, *placed = fixed.place(memory, block)
        inputs = (tokens, [pad(one, (*tokens.shape, *one.shape[2:])) for one in more], *placed)
        out = self._call(fixed, block, inputs, run_eager)
        if out is None:
            return None
        self.log.forwards += 1
        return [one[: memory.batch, : block.length] for one in out]

    def _call(
        self,
        fixed: FixedSlots,
        block: TokenBlock,
        inputs: tuple[Any, ...],
        run_eager: Callable[[], Tensor],
    ) -> Sequence[Tensor] | None:
        key = (fixed.rows, inputs[0].shape[1] == 1, block.num_preceding > 0)
        graph, is_new = self.graphs.get(key), False
        if graph is None:
            graph, is_new = self._compile(), True
            for tensor, axis in _symbolic(inputs, fixed):
                torch._dynamo.mark_dynamic(tensor, axis)
        counted = _count_graphs()
        try:
            is_captured = block.tokens.device.type == "cuda" and self.backend == "inductor"
            if is_captured:
                torch.compiler.cudagraph_mark_step_begin()
            out: Sequence[Tensor] = graph(*inputs, fixed.base, fixed.offsets, fixed.parts)
            if is_captured:  # the next replay writes the same memory
                out = [one.clone() for one in out]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a class may fail to compile in any way
            if not is_new:
                raise
            self._refuse(f"torch.compile failed ({first_line(error)})")
            return None
        self.log.graphs += _count_graphs() - counted
        if is_new and (gap := _difference(out[0], block, run_eager(), fixed.batch)) is not None:
            self._refuse(f"its scores differ when compiled (by {gap:.2g} of their spread)")
            return None
        self.graphs[key] = graph
        return out

    def _refuse(self, reason: str) -> None:
        self.is_refused = True
        self.log.refuse(self.name, reason)

    def _compile(self) -> Callable[..., Any]:
        """The function of one graph."""
        step: Any = self.make()
        if self.backend == EAGER:
            return cast(Callable[..., Any], step)
        # torch keeps graphs, and limits their number, by code object: each has one of its own
        step.__code__ = step.__code__.replace(co_name=f"read_block_{len(self.graphs)}")
        how: dict[str, Any] = {}
        if self.backend == "inductor" and torch.cuda.is_available():
            how = {"mode": "reduce-overhead"}
        compiled: Callable[..., Any] = torch.compile(
            step, fullgraph=True, backend=self.backend, **how
        )
        return compiled


class CompiledBlocks:
    """The compiled reads of one `Backbone`; `layers` are hidden states that it records."""

    def __init__(
        self,
        reader: Backbone,
        log: CompileLog,
        layers: Sequence[int] = (),
        backend: str = "inductor",
    ) -> None:
        self.layers, self.reader = tuple(layers), reader
        self.modules = (reader.decoder, reader.head)  # of the graphs
        self.graphs = BlockGraphs(type(reader.model).__name__, log, backend, self._make_step)

    def prepare(self, reader: Backbone, memory: Any, new_tokens: int) -> None:
        """Move the memory of a prompt to fixed buffers, if its blocks can be read compiled."""
        self.graphs.prepare(memory, new_tokens, _find_obstacle(reader))

    def read(
        self, reader: Backbone, memory: Memory, block: TokenBlock
    ) -> tuple[Tensor, Tensor] | None:
        """Logits and last hidden states as `Backbone.read`; None where it must run eager."""
        if self.modules != (reader.decoder, reader.head):
            self.reader, self.modules = reader, (reader.decoder, reader.head)
            self.graphs.graphs.clear()
        out = self.graphs.run(memory, block, (), lambda: reader.read_eager(memory, block)[0])
        if out is None:
            return None
        first = max(block.waiting - 1, 0)
        logits, states, *recorded = out
        memory.fixed.states = dict(zip(self.layers, recorded, strict=True))
        return logits[:, first:], states[:, first:]

    def _make_step(self) -> Any:
        return _make_step(self.reader, self.layers)


def _find_obstacle(reader: Backbone) -> str | None:
    if not reader.family.is_direct:
        return "it is read by its whole forward, not by a decoder and an output head"
    if set(reader.layer_kinds) - {FULL, SLIDING}:
        return f"it has layers of {', '.join(reader.layer_kinds)}"
    modules = (*reader.decoder.modules(), *reader.head.modules())
    if any("_hf_hook" in vars(one) for one in modules):
        return "accelerate moves its inputs or weights between devices"
    if any(getattr(one, name) for one in modules for name in _HOOKS[::3]):
        return "its modules have forward hooks"
    return None


def _make_step(reader: Backbone, layers: Sequence[int]) -> Any:
    """A function of tensors alone that reads a block: logits, last states and those of `layers`."""
    decoder, sinks = record_layers(reader.decoder, layers)
    head, window, kinds = reader.head, reader.window, reader.layer_kinds
    cache_name = reader.cache_name

    def step(
        tokens: Tensor,  # (R, q)
        more: Sequence[Tensor],
        depths: Tensor,  # (R, q)
        corner: Tensor,  # (R, q, span)
        columns: Tensor,  # (5, R)
        base: Tensor,  # (R, C)
        offsets: Tensor | None,  # (axes, R, 1)
        parts: Sequence[Tensor],  # keys, values of every layer: (R, heads, C, width)
    ) -> tuple[Tensor, ...]:
        plan = BlockPlan(depths, corner, columns, base, offsets)
        masks: Any = {kind: plan.mask for kind in kinds}
        if window is not None:
            masks[SLIDING] = plan.mask_window(window)
        out = decoder(
            input_ids=tokens,
            attention_mask=masks if len(kinds) > 1 else masks[kinds[0]],
            position_ids=plan.positions,
            use_cache=True,
            **{cache_name: FixedCache(parts, plan.slots)},
        )
        states = out.last_hidden_state
        recorded = [sink.pop() if sink is not None else states for sink in sinks]
        return head(states), states, *recorded

    return step


def record_layers(decoder: Any, layers: Sequence[int]) -> tuple[Any, list[list[Tensor] | None]]:
    """A shallow copy of a decoder that appends the states of layers to lists.

    Layers are Hugging Face indices: 0 is the input of the first one, i the output of layer i - 1.
    The last one is after the final norm: None, the decoder's own output.
    """
    twin: Any = _without_hooks(without_layers(decoder, ()))
    stack = list(twin.get_submodule(layer_list_name(twin)))
    copies = dict[int, Any]()
    sinks: list[list[Tensor] | None] = []
    for layer in layers:
        if layer == len(stack):
            sinks.append(None)
            continue
        sink: list[Tensor] = []
        sinks.append(sink)
        at = max(layer - 1, 0)
        own = copies.setdefault(at, _without_hooks(copy.copy(stack[at])))
        if layer:
            own.register_forward_hook(partial(_append_output, sink))
        else:
            own.register_forward_pre_hook(partial(_append_input, sink), with_kwargs=True)
    left = [copies.get(at, layer) for at, layer in enumerate(stack)]
    twin._modules[layer_list_name(twin)] = nn.ModuleList(left)
    return twin, sinks


def _without_hooks(module: nn.Module) -> nn.Module:
    """A shallow copy shares the hooks of its original, which others add and remove."""
    for name in _HOOKS:
        setattr(module, name, OrderedDict())
    return module


def _append_output(sink: list[Tensor], module: nn.Module, args: Any, out: Any) -> None:
    sink.append(out if isinstance(out, Tensor) else out[0])


def _append_input(sink: list[Tensor], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    sink.append(args[0] if args else kwargs["hidden_states"])


def _symbolic(inputs: tuple[Any, ...], fixed: FixedSlots) -> list[tuple[Tensor, int]]:
    """The tensors and axes whose sizes differ between calls of one graph."""
    tokens, more, depths, corner, _ = inputs
    found = [(fixed.base, 1)]
    if tokens.shape[1] > 1:
        found += [(one, 1) for one in (tokens, depths, corner, *more)]
    if corner.shape[2] > 1:
        found.append((corner, 2))
    return found


def _difference(ours: Tensor, block: TokenBlock, eager: Tensor, batch: int) -> float | None:
    """How far the last scores (B, n, V) are from the eager ones; None if no more than rounding."""
    last = ours[:batch, block.length - eager.shape[1] : block.length]
    gap = float(score_difference(last, eager))
    return gap if gap > rounding_margin(eager.dtype) else None


def _count_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
