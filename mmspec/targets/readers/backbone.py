"""One Hugging Face model as the engine sees it: read a prompt, then read blocks behind it.

Families differ in few things, and those are data (`Family`); the modelling code is never copied.
Prefill goes through the model's own preparation, so positions, image features and masks are the
family's own; blocks go through the text decoder with explicit positions and an explicit mask.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec import _hf
from mmspec.targets.cache import SlotCache, keeps_cache, takes_cache
from mmspec.targets.memory import Memory, RowMemories, TokenBlock
from mmspec.targets.readers.family import Family
from mmspec.targets.readers.reader import USES, Reader, step, takes_masks
from mmspec.targets.readers.thinned import replaced, without_layers
from mmspec.targets.readers.visual import causal, counted, hide, weigh
from mmspec.targets.tokens.inputs import leading
from mmspec.targets.tokens.turns import EarlierTurns, load, prompt_slots, whole_mask

FULL, SLIDING = "full_attention", "sliding_attention"
_RECURRENT = ("linear_attention", "conv")
_MIXED = {"hybrid", "hybrid_sliding"}  # both in one layer: each model names their masks itself
ROOM = 1024  # most slots set aside at once behind a prompt; buffers double when they are full


class Backbone(Reader):
    """A causal model with its family; holds no state of any request.

    Blocks are placed by explicit positions and masks. Where a class takes none, or reads them
    otherwise than needed (`obstacle`, `mmspec.targets.readers.check`), chains are read row by row,
    each as the model's own step of several tokens (`stepwise`): it then makes positions and masks
    itself. Raises ValueError at construction for what cannot work: a cache that cannot roll back,
    an attention kernel that takes no mask.
    """

    is_whole = True  # whether no layer is left out

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family = model, family
        self.names = _hf.forward_names(model)
        self.cache_name = _hf.cache_name(model)
        takes_cache(model)
        self._configure()

    def _configure(self) -> None:
        """Note what the model's parts and its configuration say, as they are now."""
        model = self.model
        self.config = model.config.get_text_config(decoder=True)
        self.cache_config, self._seen = model.config, {**vars(self.config)}
        self.configuration = model.config.to_json_string(use_diff=False)
        self.is_masked_by_row = not takes_masks(self.config)
        slots = self._slots = SlotCache(model.config)  # never written
        is_recurrent = not slots.can_branch
        self.decoder = model.get_decoder()
        self.head = model.get_output_embeddings()
        self.obstacle = obstacle_of(model)
        self.can_branch = not is_recurrent and self.obstacle is None
        self.layer_kinds, self.window = layer_kinds_of(self.config)
        is_placed = slots.is_slotted and not set(self.layer_kinds) & _MIXED
        self.stepwise = set[str]() if is_placed and self.obstacle is None else set(USES)
        if is_recurrent:
            state = "a recurrent state" if slots.is_slotted else "layers that compress or roll"
            self.obstacle = f"keeps {state}, one per branch of a tree would be needed"
        self.last_position = last_position_of(self.config)
        self.border = Border.of(self.config)
        # without a mask of ours transformers looks for one of its own, which costs as much as
        # masking a few layers: a deep model gains, a drafter of a layer or two would lose
        self.bare = self.layer_kinds == (FULL,) and len(slots.layers) > 4

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.model, self.decoder, self.head)

    def embed(self, tokens: Tensor) -> Tensor:  # (B, q) -> (B, q, D)
        """What the decoder reads for tokens."""
        embeds: Tensor = self.model.get_input_embeddings()(tokens)
        return embeds

    def prefill(
        self,
        inputs: Mapping[str, Any],
        room: int,
        past: EarlierTurns | None = None,
        scored: int = 1,
    ) -> tuple[Memory | RowMemories, Tensor, Mapping[str, Any]]:
        """Read the prompt. Returns its memory, the next-token logits (B, V) and the model's output.

        `inputs` are the processor's tensors; their mask may hide slots before and between tokens.
        "sizes" (B, L) say how often a slot counts (`mmspec.targets.readers.visual`).
        `room` is how many slots may be needed behind them, `past` what was read in earlier turns;
        the output holds logits of the last `scored` places at least.
        """
        self._follow()
        inputs, sizes = counted(self, inputs)
        kept = self._slots
        cache = kept.emptied() if kept.can_branch else SlotCache(self.cache_config)
        mask = whole_mask(inputs, past)
        start = cache.plan.start = 0 if past is None else past.length
        cache.plan.capacity = prompt_slots(inputs, past) + min(room, ROOM)
        if past is not None:
            load(past, cache)
        is_told, seen = past is not None and past.is_told, {**inputs, "attention_mask": mask}
        prepared = _hf.prefill_inputs(self.model, seen, cache, is_told, scored)
        prepared[self.cache_name] = cache  # Phi-3 drops an empty one behind its short positions
        carrier = prepared.get("input_ids")
        carrier = prepared["inputs_embeds"] if carrier is None else carrier
        batch, length = carrier.shape[0], start + carrier.shape[1]
        cache.plan_uniform(start, length - start)
        if sizes is not None:
            prepared["attention_mask"] = causal(sizes, mask, self.model.dtype)
        out = self.model(**prepared, return_dict=True)
        pads = leading(mask, batch)
        gaps = None if mask is None or int((mask == 0).sum()) == sum(pads) else mask
        is_stepwise = USES[batch > 1] in self.stepwise
        if gaps is not None and is_stepwise:
            raise ValueError(
                f"{type(self.model).__name__} is read in its own steps, and attention_mask hides "
                "tokens inside a prompt; drop them and pad on the left"
            )
        rope, offsets, axes = next_rope(prepared.get("position_ids"), batch, length)
        end = PromptEnd(length, pads, rope, offsets, axes, is_stepwise, gaps, sizes)
        carried = self._carried(inputs, prepared, out, past)
        is_shared = batch == 1 or (self.can_branch and not is_stepwise)
        rows = [slice(0, batch)] if is_shared else [slice(at, at + 1) for at in range(batch)]
        memories = []
        for row in rows:
            own = cache if is_shared else cache.row(self.cache_config, row.start)
            one = self._memory(own, end, row)
            one.carried = {name: _row(value, row, batch) for name, value in carried.items()}
            memories.append(one)
        memory = memories[0] if is_shared else RowMemories(memories)
        return memory, self.divided(out.logits[:, -1]), out

    def _follow(self) -> None:
        """Take up what its user has done to the model since: another output head, another window.

        Raises ValueError for a model that keeps nothing of what it reads while it learns.
        """
        keeps_cache(self.model)
        if self.is_whole and vars(self.config) != self._seen:
            self._configure()
        elif self.is_whole:
            self.decoder = self.model.get_decoder()
            self.head = self.model.get_output_embeddings()

    def _memory(self, cache: SlotCache, end: PromptEnd, rows: slice) -> Memory:
        """What the blocks of some rows are read behind."""
        pads, rope = end.pads[rows], end.rope[rows]
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        one = Memory(cache, end.length, pads, rope, like, self.window, self.bare)
        one.offsets = None if end.offsets is None else end.offsets[:, rows]
        one.axes, one.last = end.axes and max(end.axes, self.family.rope_axes), self.last_position
        if self.border is not None and max(end.rope) <= self.border.length:
            one.last = self.border.length - 1
        one.is_stepwise = end.is_stepwise
        if end.gaps is not None:
            hide(one, end.gaps[rows])
        if end.sizes is not None:
            weigh(one, end.sizes[rows])
        return one

    def read(
        self, memory: Memory | RowMemories, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block behind what `memory` keeps. One forward.

        Returns logits (B, 1 + N, V) of the last waiting token and of every draft node, (B, N, V)
        where nothing waits, and the last hidden states of the same places when asked for. Nothing
        is kept until `memory.commit`.
        """
        if isinstance(memory, RowMemories):
            return self.read_rows(memory, block, hidden)
        mask: Any
        if memory.is_stepwise:
            positions, mask = step(memory, block)
            mask = None if self.cache_name == "cache_params" else mask  # a state: nothing is seen
        else:
            positions, mask, queries = memory.place(block)
            mask = self._masks(memory, mask, queries)
        if memory.axes > 1:
            positions = memory.on_axes(positions)
        arguments: dict[str, Any] = {
            "input_ids": block.tokens if block.embeds is None else None,
            "inputs_embeds": None if block.embeds is None else block.embedded(self.embed),
            "attention_mask": mask,
            self.cache_name: memory.cache,
            "use_cache": True,
        }
        is_counted = memory.is_stepwise and not memory.axes  # by the model itself
        if ("position_ids" in self.names or not self.names) and not is_counted:
            arguments["position_ids"] = positions
        for name, value in memory.carried.items():
            arguments[name] = spread(value, block.length)
        rows = block.length - max(block.waiting - 1, 0)
        if self.family.direct and not memory.is_stepwise:
            states = self.decoder(**arguments).last_hidden_state[:, -rows:]
            return self.head(states), states if hidden else None
        if "logits_to_keep" in self.names:
            arguments["logits_to_keep"] = rows
        out = self.model(**arguments, output_hidden_states=hidden, return_dict=True)
        logits = self.divided(out.logits[:, -rows:])
        return logits, out.hidden_states[-1][:, -rows:] if hidden else None

    def own_inputs(self, inputs: Mapping[str, Any], memory: Any) -> Mapping[str, Any]:
        """A request as the model's own preparation takes it."""
        return inputs

    def _carried(
        self,
        inputs: Mapping[str, Any],
        prepared: Mapping[str, Any],
        out: Any,
        past: EarlierTurns | None,
    ) -> dict[str, Any]:
        """What the model's own `generate()` would hand to every step beside tokens, mask, cache.

        It is asked only where a request has something beside what every model reads.
        """
        read = self.decoder if self.family.direct else self.model
        names = _hf.forward_names(read) - _PLACED
        given = {name for name, value in inputs.items() if value is not None}
        if not given & names - set(self.family.media) or inputs.get("input_ids") is None:
            return {}
        if past is not None:  # only what goes on with its last value
            types = inputs.get("token_type_ids")
            return {} if types is None else {"token_type_ids": types[:, -1:]}
        follow = _hf.next_inputs(self.model, inputs, prepared, out)
        return {name: value for name, value in follow.items() if name in names}

    def _masks(self, memory: Memory, mask: Tensor | None, queries: Tensor) -> Any:
        kinds = self.layer_kinds
        if mask is not None and self.is_masked_by_row:
            mask = mask.expand(memory.batch, -1, -1, -1)
        if kinds == (FULL,) or mask is None:
            return mask
        if kinds == (SLIDING,):
            return memory.windowed(mask, queries)
        return {
            kind: None  # recurrent layers take no mask: a block has no padding at batch 1
            if kind in _RECURRENT
            else memory.windowed(mask, queries)
            if kind == SLIDING
            else mask
            for kind in kinds
        }

    def thinned(self, skip: Sequence[int], depth: int | None = None) -> Backbone:
        """The same weights with some decoder layers left out; they share the request's memory.

        `skip` lists layers to leave out; `depth` keeps only the first layers (early exit). The
        user's model is not touched: the thinner decoder is a shallow copy with its own layer list.
        """
        twin = copy.copy(self)
        twin.is_whole, twin.decoder = False, without_layers(self.decoder, skip, depth)
        if not self.family.direct:
            twin.model = replaced(_hf.uncompiled(self.model), self.decoder, twin.decoder)
        return twin


@dataclass(frozen=True)
class PromptEnd:
    """Where a prompt of B rows, padded on the left, has left off."""

    length: int  # slots
    pads: list[int]  # (B,)
    rope: list[int]  # (B,) rotary position of the token behind it
    offsets: Tensor | None  # (axes, B, 1) what each axis adds to that
    axes: int
    is_stepwise: bool  # whether the model places tokens by itself
    gaps: Tensor | None  # (B, L) 0 = hidden, where tokens in it are
    sizes: Tensor | None  # (B, L) how often a slot counts


def next_rope(
    position_ids: Tensor | None, batch: int, length: int
) -> tuple[list[int], Tensor | None, int]:
    """Rotary position of the first token behind the prompt per row, and what each axis adds to it.

    As in `generate()` every axis goes on from the last column, whatever stood higher before: the
    frames of a long video pass the text behind it. The offsets (axes, B, 1) are None where all
    axes agree, and so wherever a prompt ends on text. The last is the number of axes.
    """
    if position_ids is None:
        return [length] * batch, None, 0
    last = position_ids[..., -1]
    if position_ids.dim() == 2:
        return [int(value) + 1 for value in last.expand(batch).tolist()], None, 1
    axes = (last[1:] if len(last) > 3 else last).expand(
        -1, batch
    )  # the first of four is text order
    rope = [int(value) + 1 for value in axes[0].tolist()]
    offsets = axes - axes[:1]
    return rope, offsets[..., None] if bool(offsets.any()) else None, len(axes)


def obstacle_of(model: Any) -> str | None:
    """Why a block cannot be placed by explicit positions and a mask; None where it can."""
    names, config = _hf.forward_names(model), model.config.get_text_config(decoder=True)
    if "input_ids" in names and "position_ids" not in names:
        return "takes no position_ids"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "has local layers that see by slots, whatever a mask says"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "has layers of chunked attention"
    return None


# what every model reads, and what a reader places itself
_READ = frozenset({"input_ids", "inputs_embeds", "attention_mask", "position_ids"})
_PLACED = _READ | {
    *("past_key_values", "cache_params", "use_cache", "logits_to_keep", "mm_token_type_ids"),
    *("return_dict", "output_hidden_states", "output_attentions", "cache_position"),
}


def spread(value: Any, length: int) -> Any:
    """An argument of a step of one token for a block of `length`: along its axis of tokens."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == 1:
        return value.expand(-1, length, *value.shape[2:])
    return value


def _row(value: Any, row: slice, batch: int) -> Any:
    """A row's own part of a carried argument."""
    return value[row] if isinstance(value, Tensor) and len(value) == batch else value


def last_position_of(config: Any) -> int | None:
    """The last row of a table of positions; None where positions are computed (RoPE)."""
    if getattr(config, "rope_parameters", None) is not None:
        return None
    size = getattr(config, "max_target_positions", None)
    size = getattr(config, "max_position_embeddings", None) if size is None else size
    return None if size is None else int(size) - 1


@dataclass(frozen=True)
class Border:
    """The length at which rotary frequencies change, for all tokens of a forward at once.

    Behind it `longrope` takes other frequencies, once, and `dynamic` others for every length. A
    draft across it would turn the tokens before it as well.
    """

    kind: str
    length: int

    @classmethod
    def of(cls, config: Any) -> Border | None:
        """The border of a text configuration; its layer kinds may have parameters of their own."""
        given = getattr(config, "rope_parameters", None) or {}
        for kind in [given] if "rope_type" in given else [kind for kind in given.values() if kind]:
            if kind["rope_type"] == "longrope":
                return cls("longrope", int(kind["original_max_position_embeddings"]))
            if kind["rope_type"] == "dynamic":
                return cls("dynamic", int(config.max_position_embeddings))
        return None

    def check(self, prompt: int, room: int) -> None:
        """Refuse a request of `prompt` and `room` new tokens that crosses it. Raises ValueError."""
        if prompt + room - 1 <= self.length:  # the last token is not read any more
            return
        if prompt <= self.length:
            raise ValueError(
                f"{self.kind!r} positions change behind {self.length} tokens; a prompt of {prompt} "
                f"and max_new_tokens={room} cross that, and a draft would change the tokens before "
                f"it; give at most {self.length - prompt + 1}, or use model.generate()"
            )
        if self.kind == "dynamic":
            raise ValueError(
                f"'dynamic' positions change with every token behind {self.length}, and the prompt "
                f"has {prompt}; shorten it, or use model.generate()"
            )


def windows_of(config: Any) -> tuple[int, ...]:
    """How far layers look back: the numbers of a text configuration that are called so."""
    return tuple({v for n, v in vars(config).items() if _WINDOW.search(n) and type(v) is int and v})


_WINDOW = re.compile("^(?!.*(layer|pattern)).*(window|attention_chunk)")


def layer_kinds_of(config: Any) -> tuple[tuple[str, ...], int | None]:
    """Kinds of decoder layers that want different masks, and the sliding window if any."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return ((SLIDING,), window) if window else ((FULL,), None)
    kinds = tuple(sorted(set(types)))
    return kinds, window if SLIDING in kinds else None
