"""Read a Hugging Face causal model: first a prompt, then blocks after it.

Differences between families are data (`Family`); modelling code is never copied. The prefill uses
the model's own preparation, hence the family's position ids, image features and masks; blocks are
read by the text decoder with explicit position ids and an explicit mask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmspec import _hf, _hf_cache
from mmspec.targets.cache import SlotCache, check_keeps_cache, check_takes_cache, last_position_of
from mmspec.targets.memory import Memory, RowMemories, TokenBlock
from mmspec.targets.readers.reader import (
    USES,
    Family,
    Reader,
    replace_module,
    takes_masks,
    without_layers,
)
from mmspec.targets.readers.rotary import PositionTable, RopeBorder, next_rope_positions
from mmspec.targets.readers.visual import add_size_bias, hide_slots, make_causal_mask, pop_sizes
from mmspec.targets.tokens.context import count_left_padding
from mmspec.targets.tokens.turns import (
    EarlierTurns,
    count_prompt_slots,
    full_attention_mask,
    load_cache,
)

if TYPE_CHECKING:
    from mmspec.targets.readers.compiled import CompiledBlocks

FULL, SLIDING = "full_attention", "sliding_attention"
_RECURRENT = ("linear_attention", "conv")
_MIXED = {"hybrid", "hybrid_sliding"}  # both in one layer; mask names differ by model
MAX_RESERVED_SLOTS = 1024  # slots reserved after a prompt; full buffers double


class Backbone(Reader):
    """A causal model with its family; holds no state of any request.

    Blocks are placed by explicit position ids and masks. If a class takes none, or interprets them
    differently (`obstacle`, `mmspec.targets.readers.check`), chains are read row by row, each as
    the model's own step of several tokens (`stepwise`), which makes positions and masks. Raises
    ValueError at construction for a cache that cannot roll back and for an attention kernel that
    takes no mask.
    """

    is_whole = True  # whether no layer is skipped
    compiled: CompiledBlocks | None = None  # what reads blocks, where `compile` asked for it
    mixers: Mapping[int, nn.Module] = {}  # what updates recurrent states, by layer

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family = model, family
        self.names = _hf.forward_names(model)
        self.cache_name = _hf.cache_name(model)
        check_takes_cache(model)
        self._configure()

    def _configure(self) -> None:
        """Read the parts and the configuration of the model."""
        model = self.model
        self.config = model.config.get_text_config(decoder=True)
        self.cache_config, self._seen = model.config, {**vars(self.config)}
        # the JSON lacks the attention implementation
        kernel = getattr(self.config, "_attn_implementation", None)
        self.configuration = f"{kernel} {model.config.to_json_string(use_diff=False)}"
        self.is_masked_by_row = not takes_masks(self.config)
        slots = self._slots = SlotCache(model.config)  # never written
        self.is_step_masked = _hf_cache.counts_tokens(slots)  # a recurrent state takes no mask
        is_recurrent = not slots.can_branch
        self.decoder = model.get_decoder()
        self.head = model.get_output_embeddings()
        self.obstacle = find_obstacle(model)
        self.can_branch = not is_recurrent and self.obstacle is None
        self.layer_kinds, self.window = layer_kinds_of(self.config)
        is_placed = slots.is_slotted and not set(self.layer_kinds) & _MIXED
        self.stepwise = set[str]() if is_placed and self.obstacle is None else set(USES)
        if is_recurrent:
            state = "a recurrent state" if slots.is_slotted else "layers that compress or roll"
            self.obstacle = f"keeps {state}, one per branch of a tree would be needed"
            self.mixers = _forked().find_mixers(self.decoder)
            self.can_fork = _forked().can_fork(self.mixers, slots)
        self.last_position = last_position_of(self.config)
        self.border = RopeBorder.from_config(self.config)
        # without a mask transformers makes its own, which costs as much as masking a few layers:
        # a deep model gains, a drafter of one or two layers loses
        self.is_maskless = self.layer_kinds == (FULL,) and len(slots.layers) > 4

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.model, self.decoder, self.head)

    def embed(self, tokens: Tensor) -> Tensor:  # (B, q) -> (B, q, D)
        """Input embeddings of tokens."""
        embeds: Tensor = self.model.get_input_embeddings()(tokens)
        return embeds

    def prefill(
        self,
        inputs: Mapping[str, Any],
        extra_slots: int,
        past: EarlierTurns | None = None,
        scored: int = 1,
    ) -> tuple[Memory | RowMemories, Tensor, Mapping[str, Any]]:
        """Read the prompt; return its memory, the next-token logits (B, V) and the model's output.

        `inputs` are the processor's tensors; their mask may hide slots before and between tokens.
        "sizes" (B, L) are the weights of slots (`mmspec.targets.readers.visual`). `extra_slots` are
        reserved after the prompt; `past` are earlier turns. The output holds logits of at least the
        last `scored` positions.
        """
        self._refresh()
        inputs, sizes = pop_sizes(self, inputs)
        kept = self._slots
        cache = kept.make_empty() if kept.can_branch else SlotCache(self.cache_config)
        mask = full_attention_mask(inputs, past)
        start = cache.plan.start = 0 if past is None else past.length
        cache.plan.capacity = count_prompt_slots(inputs, past) + min(
            extra_slots, MAX_RESERVED_SLOTS
        )
        if past is not None:
            load_cache(past, cache)
        is_told = past is not None and past.includes_cached
        seen = {**inputs, "attention_mask": mask}
        prepared = _hf.prepare_prefill_inputs(self.model, seen, cache, is_told, scored)
        prepared[self.cache_name] = cache  # Phi-3 drops an empty one after its short positions
        carrier = prepared.get("input_ids")
        carrier = prepared["inputs_embeds"] if carrier is None else carrier
        batch, length = carrier.shape[0], start + carrier.shape[1]
        cache.plan_uniform(start, length - start)
        if sizes is not None:
            prepared["attention_mask"] = make_causal_mask(sizes, mask, self.model.dtype)
        blocks = self.compiled
        model = self.model if blocks is None else blocks.attach_prompt(self, cache, extra_slots)
        out = model(**prepared, return_dict=True)
        pads = count_left_padding(mask, batch)
        gaps = None if mask is None or int((mask == 0).sum()) == sum(pads) else mask
        is_stepwise = USES[batch > 1] in self.stepwise
        if gaps is not None and is_stepwise:
            raise ValueError(
                f"{type(self.model).__name__} is read in its own steps, and attention_mask hides "
                "tokens inside a prompt; drop them and pad on the left"
            )
        rope, offsets, axes = next_rope_positions(prepared.get("position_ids"), batch, length)
        find = self.family.next_positions
        later = None if find is None or past is not None else find(self.model, inputs)
        if later is not None:
            axes = len(later)
        end = PromptEnd(length, pads, rope, offsets, axes, is_stepwise, gaps, sizes, later)
        carried = self._extra_step_inputs(inputs, prepared, out, past)
        is_shared = batch == 1 or (self.can_branch and not is_stepwise)
        rows = [slice(0, batch)] if is_shared else [slice(at, at + 1) for at in range(batch)]
        memories = []
        for row in rows:
            own = cache if is_shared else cache.row(self.cache_config, row.start)
            one = self._memory(own, end, row)
            one.step_inputs = {name: _row(value, row, batch) for name, value in carried.items()}
            memories.append(one)
        memory = memories[0] if is_shared else RowMemories(memories)
        return memory, self.divide_logits(out.logits[:, -1]), out

    def compile_blocks(self, make_graphs: Callable[..., Any], layers: Sequence[int] = ()) -> str:
        compiled = import_module("mmspec.targets.readers.compiled")  # by those who ask for it alone
        self.compiled = compiled.CompiledBlocks(self, make_graphs, layers)
        return ""

    def prepare_graphs(self, memory: Any, new_tokens: int) -> None:
        if self.compiled is not None:
            self.compiled.prepare(self, memory, new_tokens)

    def _refresh(self) -> None:
        """Follow changes of the model since the last request: another output head or window.

        Raises ValueError for a model in training with gradient checkpointing.
        """
        check_keeps_cache(self.model)
        if self.is_whole and vars(self.config) != self._seen:
            self._configure()
        elif self.is_whole:
            decoder = self.model.get_decoder()
            if decoder is not self.decoder and self.mixers:
                self.mixers = _forked().find_mixers(decoder)
            self.decoder = decoder
            self.head = self.model.get_output_embeddings()

    def _memory(self, cache: SlotCache, end: PromptEnd, rows: slice) -> Memory:
        """The memory of some rows after the prompt."""
        pads, rope = end.pads[rows], end.rope[rows]
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        one = Memory(cache, end.length, pads, rope, like, self.window, self.is_maskless)
        one.offsets = None if end.offsets is None else end.offsets[:, rows]
        one.axes, one.max_position = (
            end.axes and max(end.axes, self.family.rope_axes),
            self.last_position,
        )
        if end.later is not None:
            first = torch.tensor(rope, device=self.device)[:, None]
            one.table = PositionTable(end.later[:, rows], first)
        if self.border is not None and max(end.rope) <= self.border.length:
            one.max_position = self.border.length - 1
        one.is_stepwise = end.is_stepwise
        if end.gaps is not None:
            hide_slots(one, end.gaps[rows])
        if end.sizes is not None:
            add_size_bias(one, end.sizes[rows])
        return one

    def read(
        self, memory: Memory | RowMemories, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block after the committed slots of `memory`. One forward.

        Returns logits (B, 1 + N, V) of the last pending token and of every draft node, (B, N, V)
        if nothing is pending, and the last hidden states of the same positions if requested.
        Nothing is committed until `memory.commit`.
        """
        if isinstance(memory, RowMemories):
            return self.read_rows(memory, block, hidden)
        if memory.fixed is not None and self.compiled is not None:
            found = self.compiled.read(self, memory, block)
            if found is not None:
                return found[0], found[1] if hidden else None
        return self.read_eager(memory, block, hidden)

    def read_eager(
        self, memory: Memory, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`read` without compiled graphs."""
        if self.can_fork and not block.is_chain:
            memory.forked = _forked().ForkedRead(self.mixers, memory.cache, block)
            with memory.forked:
                return self._read_block(memory, block, hidden)
        memory.forked = None
        return self._read_block(memory, block, hidden)

    def _read_block(
        self, memory: Memory, block: TokenBlock, hidden: bool
    ) -> tuple[Tensor, Tensor | None]:
        mask: Any
        is_step = memory.is_stepwise and block.is_chain
        if is_step:
            positions, mask = memory.place_step(block)
            mask = mask if self.is_step_masked else None
        else:
            positions, mask, queries = memory.place(block)
            mask = self._masks(memory, mask, queries) if self.is_step_masked else None
        if memory.axes > 1:
            positions = memory.spread_axes(positions)
        arguments: dict[str, Any] = {
            "input_ids": block.tokens if block.embeds is None else None,
            "inputs_embeds": None if block.embeds is None else block.embed_tokens(self.embed),
            "attention_mask": mask,
            self.cache_name: memory.cache,
            "use_cache": True,
        }
        is_counted = is_step and not memory.axes  # by the model
        if ("position_ids" in self.names or not self.names) and not is_counted:
            arguments["position_ids"] = positions
        for name, value in memory.step_inputs.items():
            arguments[name] = spread(value, block.length)
        rows = block.length - max(block.waiting - 1, 0)
        if self.family.is_direct and not is_step:
            states = self.decoder(**arguments).last_hidden_state
            states = states if rows == states.shape[1] else states[:, -rows:]
            return self.head(states), states if hidden else None
        if "logits_to_keep" in self.names:
            arguments["logits_to_keep"] = rows
        out = self.model(**arguments, output_hidden_states=hidden, return_dict=True)
        logits = self.divide_logits(out.logits[:, -rows:])
        return logits, out.hidden_states[-1][:, -rows:] if hidden else None

    def model_inputs(self, inputs: Mapping[str, Any], memory: Any) -> Mapping[str, Any]:
        """The request as inputs of the model's own preparation."""
        return inputs

    def _extra_step_inputs(
        self,
        inputs: Mapping[str, Any],
        prepared: Mapping[str, Any],
        out: Any,
        past: EarlierTurns | None,
    ) -> dict[str, Any]:
        """Inputs of every step of the model's `generate()` other than tokens, mask and cache.

        Only computed if the request has further inputs than all models.
        """
        read = self.decoder if self.family.is_direct else self.model
        names = _hf.forward_names(read) - _PLACED
        given = {name for name, value in inputs.items() if value is not None}
        if not given & names - set(self.family.media) or inputs.get("input_ids") is None:
            return {}
        if past is not None:  # only what repeats its last value
            types = inputs.get("token_type_ids")
            return {} if types is None else {"token_type_ids": types[:, -1:]}
        follow = _hf.prepare_next_inputs(self.model, inputs, prepared, out)
        return {name: value for name, value in follow.items() if name in names}

    def _masks(self, memory: Memory, mask: Tensor | None, queries: Tensor) -> Any:
        kinds = self.layer_kinds
        if mask is not None and self.is_masked_by_row:
            mask = mask.expand(memory.batch, -1, -1, -1)
        if kinds == (FULL,) or mask is None or set(kinds) & _MIXED:
            return mask
        if kinds == (SLIDING,):
            return memory.mask_window(mask, queries)
        return {
            kind: None  # recurrent layers need no mask: a block has no padding at batch 1
            if kind in _RECURRENT
            else memory.mask_window(mask, queries)
            if kind == SLIDING
            else mask
            for kind in kinds
        }

    def skip_layers(self, skip: Sequence[int], depth: int | None = None) -> Backbone:
        """A reader of the same weights without some decoder layers; memories are compatible.

        `skip` lists layers to skip; `depth` keeps only the first layers (early exit). The user's
        model is not changed: the decoder is a shallow copy with its own layer list.
        """
        twin = copy.copy(self)
        twin.is_whole, twin.compiled = False, None
        twin.decoder = without_layers(self.decoder, skip, depth)
        twin.mixers = _forked().find_mixers(twin.decoder) if self.mixers else {}
        if not self.family.is_direct:
            twin.model = replace_module(_hf.unwrap_compiled(self.model), self.decoder, twin.decoder)
        return twin


@dataclass(frozen=True)
class PromptEnd:
    """The end of a prompt of B rows, padded on the left."""

    length: int  # slots
    pads: list[int]  # (B,)
    rope: list[int]  # (B,) rotary position of the next token
    offsets: Tensor | None  # (axes, B, 1) offset of each axis to that
    axes: int
    is_stepwise: bool  # whether the model makes positions and masks
    gaps: Tensor | None  # (B, L) 0 = masked, if tokens inside are
    sizes: Tensor | None  # (B, L) weights of slots
    later: Tensor | None  # (axes, B, T) positions of the tokens after it, if these do not count on


def _forked() -> Any:
    """What reads trees on recurrent layers, imported on demand."""
    return import_module("mmspec.targets.readers.forked")


def find_obstacle(model: Any) -> str | None:
    """Why a block cannot be placed by explicit positions and a mask; None if it can."""
    names, config = _hf.forward_names(model), model.config.get_text_config(decoder=True)
    if "input_ids" in names and "position_ids" not in names:
        return "takes no position_ids"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "has local layers that see by slots, whatever a mask says"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "has layers of chunked attention"
    return None


# inputs of every model, and those that a reader sets
_READ = frozenset({"input_ids", "inputs_embeds", "attention_mask", "position_ids"})
_PLACED = _READ | {
    *(*_hf_cache.CACHE_NAMES, "use_cache", "logits_to_keep", "mm_token_type_ids"),
    *("return_dict", "output_hidden_states", "output_attentions", "cache_position"),
}


def spread(value: Any, length: int) -> Any:
    """Expand an argument of a one-token step to a block of `length`, along its token axis."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == 1:
        return value.expand(-1, length, *value.shape[2:])
    return value


def _row(value: Any, row: slice, batch: int) -> Any:
    """The rows of a step input."""
    return value[row] if isinstance(value, Tensor) and len(value) == batch else value


def layer_kinds_of(config: Any) -> tuple[tuple[str, ...], int | None]:
    """Kinds of decoder layers that need different masks, and the sliding window if any."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return ((SLIDING,), window) if window else ((FULL,), None)
    kinds = tuple(sorted(set(types)))
    return kinds, window if SLIDING in kinds else None
