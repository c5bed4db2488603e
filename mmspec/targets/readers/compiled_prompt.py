"""Prompts read by one compiled graph: `accelerate(model, compile=True)`.

The model's own forward embeds a prompt, encodes its images and makes its positions; only the
decoder's forward is a graph. Prompts are padded on the right to one of a few lengths, and keys and
values are written to buffers of fixed capacity. Causal masks hide the padding from every token:

    slot     0  1  2  3  4  5  6  7      row 1 has left padding of its own
    row 0    a  b  c  d  e  .  .  .      . = padding of the graph
    row 1    p  p  f  g  h  .  .  .

The first prompt of every kind is read eager and by the new graph, and both are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.targets.cache import SlotCache
from mmspec.targets.fixed import (
    MIN_CAPACITY,
    BufferStore,
    round_power,
    split_layers,
    use_buffer,
)
from mmspec.targets.graphs import Function, GraphSet
from mmspec.targets.memory import Memory
from mmspec.targets.prompts import (
    PromptCache,
    PromptTensors,
    make_masks,
    round_prompt,
    symbolic_axes,
)
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.hooks import find_recorders, note_states, record_layers
from mmspec.targets.readers.reader import replace_module
from mmspec.targets.readers.rounding import rounding_margin, score_difference
from mmspec.targets.slots import SlotLayer

MAX_SLOTS = 2048  # of all rows: the forward of a longer prompt is bound by arithmetic
# arguments of a decoder that change no result of its forward
_IDLE = frozenset({"use_cache", "return_dict", "cache_position", "logits_to_keep"})


class PromptGraphs:
    """Compiled functions of prompts, by `PromptTensors.key`.

    They write keys and values into buffers (2 layers, R, heads, C, width) of `store`, which a
    cache then uses.
    """

    def __init__(self, graphs: GraphSet, store: BufferStore) -> None:
        self.graphs, self.store = graphs, store
        self.layout: Tensor | None = None  # an empty buffer of this model: its shape and dtype
        self.buffers: WeakKeyDictionary[SlotCache, Tensor] = WeakKeyDictionary()

    def read(
        self,
        cache: SlotCache,
        prompt: PromptTensors,
        room: int,
        make: Callable[[], Function],
        run_eager: Callable[[], None],
        compare: Callable[[Sequence[Tensor]], float],
    ) -> Sequence[Tensor] | None:
        """Results (R, L', ...) of a prompt that a graph read into `cache`; None if `run_eager` did.

        `room` are the slots needed after it, and `make` makes the function. `compare` says how far
        the results of a new graph are from those of `run_eager`, in units of their spread.
        """
        slots = round_prompt(prompt.length)
        if prompt.rows * slots > MAX_SLOTS:
            self.graphs.note(f"prompts of more than {MAX_SLOTS} slots are bound by arithmetic")
        can_run = prompt.rows * slots <= MAX_SLOTS and not torch.is_grad_enabled()
        if not can_run or prompt.key not in self.graphs.graphs:
            run_eager()
            if can_run and not self.graphs.is_refused:
                self._compile(cache, prompt, make, compare)
            return None
        buffer = self._take(prompt, max(prompt.length + room, slots))
        out = self._run(prompt, buffer, make, lambda out: None)
        use_buffer(cache, buffer[:, : prompt.batch])
        self.buffers[cache] = buffer
        return out

    def take_buffer(self, memory: Memory) -> Tensor | None:
        """The buffer that the prompt of a memory was read into; once."""
        return self.buffers.pop(memory.cache, None)

    def _take(self, prompt: PromptTensors, slots: int) -> Tensor:
        assert self.layout is not None
        count, heads, width = self.layout.shape[0], self.layout.shape[2], self.layout.shape[4]
        shape = (count, prompt.rows, heads, round_power(slots, MIN_CAPACITY), width)
        return self.store.take(shape, self.layout)

    def _compile(
        self,
        cache: SlotCache,
        prompt: PromptTensors,
        make: Callable[[], Function],
        compare: Callable[[Sequence[Tensor]], float],
    ) -> None:
        """Compile a graph, and compare it with the prompt that was read eager into `cache`."""
        pool, layers = cache.plan.pool.buffer, cast(Any, cache.layers)
        if pool is None or not all(type(one) is SlotLayer and one.is_pooled for one in layers):
            return  # its blocks say why they run eager
        size, length = prompt.batch, prompt.length
        self.layout = pool.new_empty(pool.shape[0], 0, pool.shape[2], 0, pool.shape[4])
        buffer = self._take(prompt, round_prompt(length))

        def find_gap(out: Sequence[Tensor]) -> float | None:
            pair = buffer[:, :size, :, :length], pool[:, :, :, :length]
            gap = max(compare(out), spread_difference(*pair, prompt.find_real_slots()))
            return gap if gap > rounding_margin(pool.dtype) else None

        self._run(prompt, buffer, make, find_gap)
        self.store.give_back(buffer)

    def _run(
        self,
        prompt: PromptTensors,
        buffer: Tensor,
        make: Callable[[], Function],
        compare: Callable[[Sequence[Tensor]], float | None],
    ) -> Sequence[Tensor] | None:
        inputs = prompt.place(split_layers(buffer))
        return self.graphs.run(prompt.key, make, inputs, lambda: symbolic_axes(inputs), compare)


class CompiledPrompts:
    """The compiled prompts of a `Backbone`; `layers` are hidden states that it records."""

    def __init__(self, prompts: PromptGraphs, layers: Sequence[int]) -> None:
        self.prompts, self.layers = prompts, tuple(layers)
        self.output: Any = None  # the type of the decoder's output

    def attach(self, reader: Backbone, cache: SlotCache, room: int) -> Any:
        """A shallow copy of the model whose decoder reads a prompt into `cache` by a graph.

        `room` are the slots needed after the prompt. The model itself where it cannot.
        """
        decoder, recorders = reader.decoder, find_recorders(reader.decoder)
        if recorders is None or {at for one in recorders for at in one.noted} - {*self.layers}:
            return reader.model
        if self.prompts.graphs.is_refused or _hf.unwrap_compiled(reader.model) is not reader.model:
            return reader.model
        twin = copy.copy(decoder)

        def forward(*args: Any, **given: Any) -> Any:
            prompt = None if args else self._collect(reader, cache, given)
            if prompt is None:
                return decoder.forward(*args, **given)
            eager: list[Any] = []
            out = self.prompts.read(
                cache,
                prompt,
                room,
                lambda: make_prompt_step(reader, self.layers, sorted(prompt.masks)),
                lambda: eager.append(self._run_eager(reader, given)),
                lambda out: _compare_last(reader, prompt, out[0], eager[0].last_hidden_state),
            )
            if out is None:
                return eager[0]
            states, *recorded = (one[: prompt.batch, : prompt.length] for one in out)
            note_states(recorders, decoder, dict(zip(self.layers, recorded, strict=True)))
            return self.output(last_hidden_state=states, **{reader.cache_name: cache})

        twin.forward = forward
        return replace_module(reader.model, decoder, twin)

    def _run_eager(self, reader: Backbone, given: Mapping[str, Any]) -> Any:
        out = reader.decoder.forward(**given)
        if more := sorted(out.keys() - {"last_hidden_state", reader.cache_name}):
            self.prompts.graphs.refuse(f"its decoder returns {', '.join(more)}")
        self.output = type(out)
        return out

    def _collect(
        self, reader: Backbone, cache: SlotCache, given: Mapping[str, Any]
    ) -> PromptTensors | None:
        """The inputs of the decoder; None where they are not those of a whole prompt."""
        own = {n: v for n, v in given.items() if v is not None and v is not False}
        ids, embeds = own.pop("input_ids", None), own.pop("inputs_embeds", None)
        carrier, mask = ids if embeds is None else embeds, own.pop("attention_mask", None)
        positions = own.pop("position_ids", None)
        is_own = own.pop(reader.cache_name, None) is cache and cache.plan.start == 0
        if carrier is None or positions is None or not is_own:
            return None
        if more := sorted(own.keys() - _IDLE):
            self.prompts.graphs.note(f"a prompt has {', '.join(more)}")
            return None
        masks: dict[str, Tensor] = {}
        if isinstance(mask, Mapping):
            masks = {kind: one for kind, one in mask.items() if one is not None}
        elif mask is not None and mask.dim() == 4:
            masks = dict.fromkeys(reader.layer_kinds, mask)
        visible = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        placed = [one for one in (positions, visible, *masks.values()) if one is not None]
        if any(one.shape[-1] != carrier.shape[1] for one in placed):
            self.prompts.graphs.note("a prompt has masks or positions of another shape")
            return None
        return PromptTensors((carrier,), positions, visible, masks)


def _compare_last(reader: Backbone, prompt: PromptTensors, ours: Tensor, theirs: Tensor) -> float:
    """How far scores after a prompt are apart, from last hidden states (R, L', D), (B, L, D)."""
    last = ours[: prompt.batch, prompt.length - 1 : prompt.length]
    return float(score_difference(reader.head(last), reader.head(theirs[:, -1:])))


def make_prompt_step(reader: Backbone, layers: Sequence[int], given: Sequence[str]) -> Function:
    """A function of tensors alone that reads a prompt: last states and those of `layers`.

    `given` are the kinds of layers whose masks are inputs.
    """
    decoder, sinks = record_layers(reader.decoder, layers)
    window, kinds, cache_name = reader.window, reader.layer_kinds, reader.cache_name

    def step(
        positions: Tensor,  # (R, L) or (axes, R, L)
        carriers: Sequence[Tensor],  # (R, L) or (R, L, D)
        hidden: Tensor,  # (R, L) bias of padding
        masks: Sequence[Tensor],  # (R, 1, L, L) each
        parts: Sequence[Tensor],  # keys, values of every layer: (R, heads, C, width)
    ) -> tuple[Tensor, ...]:
        made = make_masks(hidden, kinds, window) | dict(zip(given, masks, strict=True))
        (carrier,) = carriers
        name = "input_ids" if carrier.dim() == 2 else "inputs_embeds"
        out = decoder(
            attention_mask=made if len(kinds) > 1 else made[kinds[0]],
            position_ids=positions,
            use_cache=True,
            **{name: carrier, cache_name: PromptCache(parts)},
        )
        states = out.last_hidden_state
        return states, *(sink.pop() if sink is not None else states for sink in sinks)

    return step


def spread_difference(ours: Tensor, theirs: Tensor, real: Tensor | None) -> float:
    """Difference of keys and values (2 layers, B, heads, L, width), in units of their spread.

    Of the slots where `real` (B, L), and of the layer that differs most.
    """
    apart, own = (ours - theirs).float().square(), theirs.float()
    if real is not None:
        apart = apart * real[None, :, None, :, None]
    ratio = apart.flatten(1).mean(1).sqrt() / own.flatten(1).std(1).clamp_min(1e-6)
    return float(ratio.nan_to_num(torch.inf).amax())
