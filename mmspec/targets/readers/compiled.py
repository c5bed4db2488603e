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

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from mmspec.stats import DRAFTER, IMAGES, PROMPT, TARGET, CompileLog
from mmspec.targets.cache import SlotCache
from mmspec.targets.fixed import BlockPlan, BufferStore, FixedCache, FixedSlots, pad
from mmspec.targets.graphs import GraphSet, ModuleFingerprint, parse_backend, trace
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.readers.backbone import FULL, SLIDING, Backbone
from mmspec.targets.readers.compiled_images import CompiledImages
from mmspec.targets.readers.compiled_prompt import CompiledPrompts, PromptGraphs
from mmspec.targets.readers.hooks import list_modules, record_layers, wanted_layers
from mmspec.targets.readers.rounding import rounding_margin, score_difference

ROOM = 64  # slots for drafts beside the new tokens of a request
MAX_RESERVED = 1024  # new tokens that a buffer is made for at once


def compile_readers(
    target: Any, draft: Any, features: Iterable[str], option: bool | str
) -> CompileLog:
    """Let the reader of a target, and of its draft model, read blocks by compiled graphs.

    `draft` is a reader or a `mmspec.drafters.draft_model.DraftModel`, or None; `features`
    are those that the target provides; `option` is the value of `compile=`. What cannot be compiled
    is in the log. Raises ValueError for an option that is no backend.
    """
    found, backend = CompileLog(), parse_backend(option)
    recorded = sorted({one for layers in wanted_layers(features).values() for one in layers})
    for part, reader, more in ((TARGET, target, (recorded,)), (DRAFTER, draft, ())):
        if reader is None:
            continue
        name = type(vars(reader).get("model", reader)).__name__
        reason = reader.compile_blocks(
            partial(BlockGraphs, GraphSet(name, found, backend, part)), *more
        )
        if reason:
            found.refuse(name, reason, part)
    return found


class BlockGraphs:
    """Compiled functions of padded blocks: per number of rows, for one token and for several.

    `make` returns a function of tokens (R, q), further inputs (R, q, ...), and depths, corner,
    columns, base, offsets and parts as `FixedSlots.place` gives them; its results are (R, q, ...).
    `modules` are those that it runs. Blocks are padded to `least` tokens: with 2, there is no graph
    for one token alone.
    """

    def __init__(
        self,
        graphs: GraphSet,
        make: Callable[[], Any],
        modules: Callable[[], Iterable[nn.Module]],
        least: int = 1,
    ) -> None:
        self.graphs, self.make, self.modules, self.least = graphs, make, modules, least
        self.store = BufferStore()
        own = GraphSet(graphs.name, graphs.log, graphs.backend, PROMPT, forwards=0)
        self.prompts = PromptGraphs(own, self.store)
        self.followed: Callable[[], Any] = lambda: None  # the cache of the last prompt

    def prepare(self, memory: Any, new_tokens: int, obstacle: str | None = None) -> None:
        """Move the memory of a prompt to fixed buffers, if its blocks can be read compiled."""
        if self.graphs.is_refused:
            return
        reason = obstacle or FixedSlots.find_obstacle(memory)
        if reason is not None:
            self.graphs.note(reason)
        else:
            if memory.cache is not self.followed():
                self.follow()
            if memory.fixed is None:  # else another reader's, of the same memory
                buffer, room = self.prompts.take_buffer(memory), count_room(new_tokens)
                memory.fixed = FixedSlots(memory, self.store, room, buffer)

    def follow(self, cache: Any = None) -> None:
        """Compile anew if the modules have changed; once per request, before a prompt is read.

        `cache` is that of the prompt.
        """
        self.followed = (lambda: None) if cache is None else ref(cache)
        found = ModuleFingerprint(self.modules())
        for one in (self.graphs, self.prompts.graphs):
            one.follow(found)

    def clear(self) -> None:
        """Compile everything anew."""
        for one in (self.graphs, self.prompts.graphs):
            one.clear()

    def is_ready(self, memory: Any) -> bool:
        """Whether a block can be read compiled; follows rows that joined or left."""
        if self.graphs.is_refused or torch.is_grad_enabled():
            return False
        if not isinstance(memory, Memory) or memory.fixed is None:
            return False
        if not memory.fixed.is_current(memory):
            if FixedSlots.find_obstacle(memory) is not None:
                return False
            memory.fixed = FixedSlots(memory, self.store, ROOM)
        return True

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
        if not self.is_ready(memory):
            return None
        fixed = memory.fixed
        inputs = place_block(memory, block, more, self.least)
        out = self.graphs.run(
            (fixed.rows, inputs[0].shape[1] == 1, block.num_preceding > 0, len(more)),
            self.make,
            inputs,
            lambda: symbolic_axes(inputs),
            lambda out: _difference(out[0], block, run_eager(), fixed.batch),
        )
        return None if out is None else [one[: memory.batch, : block.length] for one in out]

    def run_whole(
        self, inputs: tuple[Tensor, ...], run_eager: Callable[[], Tensor]
    ) -> Sequence[Tensor] | None:
        """Results of a function of a few tensors, with a graph per shape; None = run it eager.

        `run_eager` returns what the first result (..., V) of a new graph is compared with.
        """
        if self.graphs.is_refused or torch.is_grad_enabled():
            return None

        def compare(out: Sequence[Tensor]) -> float | None:
            eager = run_eager()
            gap = float(score_difference(out[0], eager))
            return gap if gap > rounding_margin(eager.dtype) else None

        shapes = tuple(one.shape for one in inputs)
        return self.graphs.run(shapes, self.make, inputs, tuple, compare)


def count_room(new_tokens: int) -> int:
    """Slots after a prompt that a buffer is made for."""
    return min(max(new_tokens, 0), MAX_RESERVED) + ROOM


def place_block(
    memory: Memory, block: TokenBlock, more: Sequence[Tensor], least: int = 1
) -> tuple[Any, ...]:
    """The inputs of a function of padded blocks, of at least `least` tokens."""
    fixed = memory.fixed
    tokens, *placed = fixed.place(memory, block, least)
    padded = [pad(one, (*tokens.shape, *one.shape[2:])) for one in more]
    return (tokens, padded, *placed, fixed.base, fixed.offsets, fixed.parts)


class CompiledBlocks:
    """The compiled reads of one `Backbone`; `layers` are hidden states that it records."""

    def __init__(
        self, reader: Backbone, make_graphs: Callable[..., BlockGraphs], layers: Sequence[int] = ()
    ) -> None:
        self.layers, self.reader, self.configuration = tuple(layers), reader, reader.configuration
        self.graphs = make_graphs(self.make_step, self._modules)
        self.prompts = CompiledPrompts(self.graphs.prompts, self.layers)
        self.images = CompiledImages(make_image_graphs(self.graphs.graphs))

    def attach_prompt(self, reader: Backbone, cache: SlotCache, extra_slots: int) -> Any:
        """The model that reads a prompt into `cache`, by graphs where it can."""
        self._follow(reader)
        model = reader.model
        if not cache.plan.start and _find_obstacle(reader) is None:
            self.graphs.follow(cache)
            model = self.prompts.attach(reader, cache, count_room(extra_slots - ROOM))
        return self.attach_images(reader, model)

    def attach_images(self, reader: Backbone, model: Any) -> Any:
        """A copy of the model, or of its copy `model`, that encodes images by graphs."""
        return self.images.attach(model, reader.model, reader.decoder)

    def prepare(self, reader: Backbone, memory: Any, new_tokens: int) -> None:
        """Move the memory of a prompt to fixed buffers, if its blocks can be read compiled."""
        self._follow(reader)
        self.graphs.prepare(memory, new_tokens, _find_obstacle(reader) or _find_hooks(reader))

    def _follow(self, reader: Backbone) -> None:
        """Compile anew if the configuration has changed."""
        self.reader = reader
        if self.configuration != reader.configuration:
            self.configuration = reader.configuration
            self.graphs.clear()

    def read(
        self, reader: Backbone, memory: Memory, block: TokenBlock
    ) -> tuple[Tensor, Tensor] | None:
        """Logits and last hidden states as `Backbone.read`; None where it must run eager."""
        more = () if block.embeds is None else (block.embed_tokens(reader.embed),)
        out = self.graphs.run(memory, block, more, lambda: reader.read_eager(memory, block)[0])
        if out is None:
            return None
        first = max(block.waiting - 1, 0)
        logits, states, *recorded = out
        memory.fixed.states = dict(zip(self.layers, recorded, strict=True))
        return logits[:, first:], states[:, first:]

    def make_step(self) -> Any:
        return _make_step(self.reader, self.layers)

    def _modules(self) -> tuple[nn.Module, ...]:
        return self.reader.decoder, self.reader.head


def make_image_graphs(graphs: GraphSet) -> GraphSet:
    """Graphs of the image encoders of a model, beside those of its blocks."""
    tracer = partial(trace, reads_constants=True)
    return GraphSet(graphs.name, graphs.log, graphs.backend, IMAGES, forwards=0, tracer=tracer)


def _find_obstacle(reader: Backbone) -> str | None:
    if not reader.family.is_direct:
        return "it is read by its whole forward, not by a decoder and an output head"
    if set(reader.layer_kinds) - {FULL, SLIDING}:
        return f"it has layers of {', '.join(reader.layer_kinds)}"
    if any("_hf_hook" in vars(one) for one in list_modules((reader.decoder, reader.head))):
        return "accelerate moves its inputs or weights between devices"
    return None


def _find_hooks(reader: Backbone) -> str | None:
    modules = map(vars, list_modules((reader.decoder, reader.head)))
    if any(one["_forward_hooks"] or one["_forward_pre_hooks"] for one in modules):
        return "its modules have forward hooks"
    return None


def _make_step(reader: Backbone, layers: Sequence[int]) -> Any:
    """A function of tensors alone that reads a block: logits, last states and those of `layers`."""
    decoder, sinks = record_layers(reader.decoder, layers)
    head, window, kinds = reader.head, reader.window, reader.layer_kinds
    cache_name = reader.cache_name

    def step(
        tokens: Tensor,  # (R, q)
        more: Sequence[Tensor],  # embeddings (R, q, D) to read in their place, if any
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
        name = "inputs_embeds" if more else "input_ids"
        out = decoder(
            attention_mask=masks if len(kinds) > 1 else masks[kinds[0]],
            position_ids=plan.positions,
            use_cache=True,
            **{name: more[0] if more else tokens, cache_name: FixedCache(parts, plan.slots)},
        )
        states = out.last_hidden_state
        recorded = [sink.pop() if sink is not None else states for sink in sinks]
        return head(states), states, *recorded

    return step


def symbolic_axes(inputs: tuple[Any, ...]) -> list[tuple[Tensor, int]]:
    """The tensors and axes whose sizes differ between calls of one graph."""
    tokens, more, depths, corner, _, base, *_ = inputs
    found = [(base, 1)]
    if tokens.shape[1] > 1:
        found += [(one, 1) for one in (tokens, depths, corner, *more)]
    if corner.shape[2] > 1:
        found.append((corner, 2))
    return found


def _difference(ours: Tensor, block: TokenBlock, eager: Tensor, batch: int) -> float | None:
    """How far the last scores (B, n, V) are from the eager ones; None if no more than rounding."""
    last = ours[:batch, : block.length][:, -eager.shape[1] :]
    gap = float(score_difference(last, eager))
    return gap if gap > rounding_margin(eager.dtype) else None
