"""One Hugging Face model as the engine sees it: read a prompt, then read blocks behind it.

Families differ in few things, and those are data (`Family`); the modelling code is never copied.
Prefill goes through the model's own preparation, so positions, image features and masks are the
family's own; blocks go through the text decoder with explicit positions and an explicit mask.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec import _hf
from mmspec.targets.cache import SlotCache
from mmspec.targets.family import Family
from mmspec.targets.memory import Memory, RowMemories, TokenBlock
from mmspec.targets.reader import Reader
from mmspec.targets.turns import Past, load, whole_mask

FULL, SLIDING = "full_attention", "sliding_attention"
ROOM = 1024  # most slots set aside at once behind a prompt; buffers double when they are full


class Backbone(Reader):
    """A causal model with its family; holds no state of any request.

    Raises ValueError at construction for what cannot work: a cache that cannot roll back, an
    attention kernel that takes no mask, layer kinds whose mask is unknown.
    """

    def __init__(self, model: Any, family: Family) -> None:
        takes_positions(model)
        self.model, self.family = model, family
        self.config = model.config.get_text_config(decoder=True)
        self.cache_config = model.config
        kernel = self.config._attn_implementation
        if kernel not in ("sdpa", "eager"):
            raise ValueError(
                f"attention implementation {kernel!r} takes no tree mask; load the model with "
                "attn_implementation='sdpa'"
            )
        self.can_branch = SlotCache(model.config).can_branch
        self.decoder = model.get_decoder()
        self.head = model.get_output_embeddings()
        self.layer_kinds, self.window = layer_kinds_of(self.config)
        self.last_position = last_position_of(self.config)
        self.border = Border.of(self.config)
        # without a mask of ours transformers looks for one of its own, which costs as much as
        # masking a few layers: a deep model gains, a drafter of a layer or two would lose
        self.bare = self.layer_kinds == (FULL,) and self.config.num_hidden_layers > 4

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.model, self.decoder, self.head)

    def embed(self, tokens: Tensor) -> Tensor:  # (B, q) -> (B, q, D)
        """What the decoder reads for tokens."""
        embeds: Tensor = self.model.get_input_embeddings()(tokens)
        return embeds

    def prefill(
        self, inputs: Mapping[str, Any], room: int, past: Past | None = None
    ) -> tuple[Memory | RowMemories, Tensor, Mapping[str, Any]]:
        """Read the prompt. Returns its memory, the next-token logits (B, V) and the model's output.

        `inputs` are the processor's tensors; their mask may hide slots before and between tokens.
        `room` is how many slots may be needed behind them, `past` what was read in earlier turns.
        """
        cache, mask = SlotCache(self.cache_config), whole_mask(inputs, past)
        start = cache.plan.start = 0 if past is None else past.length
        prepared = _hf.prefill_inputs(
            self.model, {**inputs, "attention_mask": mask}, cache, past is not None and past.is_told
        )
        prepared["past_key_values"] = cache  # Phi-3 drops an empty one behind its short positions
        carrier = prepared.get("input_ids")
        carrier = prepared["inputs_embeds"] if carrier is None else carrier
        batch, length = carrier.shape[0], start + carrier.shape[1]
        cache.plan.capacity = length + min(room, ROOM)
        if past is not None:
            load(past, cache)
        cache.plan_uniform(start, length - start)
        out = self.model(**prepared, return_dict=True)
        pads = leading(mask, batch)
        gaps = None if mask is None or int((mask == 0).sum()) == sum(pads) else mask
        rope, offsets = next_rope(prepared.get("position_ids"), batch, length)
        last = self.last_position
        if self.border is not None and max(rope) <= self.border.length:
            last = self.border.length - 1
        types = None if self.family.media else inputs.get("token_type_ids")
        types = None if types is None else types[:, -1:]  # as generate() goes on with the last one
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        how = (like, self.window, self.bare)
        if batch == 1 or self.can_branch:
            memory = Memory(cache, length, pads, rope, *how)
            memory.offsets, memory.types, memory.last = offsets, types, last
            if gaps is not None:
                hide(memory, gaps)
            return memory, out.logits[:, -1], out
        rows = []
        for row in range(batch):
            one, own = slice(row, row + 1), cache.row(self.cache_config, row)
            rows.append(Memory(own, length, pads[one], rope[one], *how))
            rows[-1].offsets = None if offsets is None else offsets[:, one]
            rows[-1].last = last
            rows[-1].types = None if types is None else types[one]
            if gaps is not None:
                hide(rows[-1], gaps[one])
        return RowMemories(rows), out.logits[:, -1], out

    def read(
        self, memory: Memory | RowMemories, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block behind what `memory` keeps. One forward.

        Returns logits (B, 1 + N, V) of the last waiting token and of every draft node, (B, N, V)
        where nothing waits, and the last hidden states of the same places when asked for. Nothing
        is kept until `memory.commit`.
        """
        if isinstance(memory, RowMemories):
            pieces = [self.read(row, block.row(i), hidden) for i, row in enumerate(memory.rows)]
            states = [state for _, state in pieces if state is not None]
            return torch.cat([logits for logits, _ in pieces]), torch.cat(
                states
            ) if hidden else None
        positions, mask, queries = memory.place(block)
        if self.family.rope_axes > 1:
            positions = memory.on_axes(positions, self.family.rope_axes)
        arguments = {
            "input_ids": block.tokens if block.embeds is None else None,
            "inputs_embeds": None if block.embeds is None else block.embedded(self.embed),
            "attention_mask": self._masks(memory, mask, queries),
            "position_ids": positions,
            "past_key_values": memory.cache,
            "use_cache": True,
        }
        if memory.types is not None:
            arguments["token_type_ids"] = memory.types.expand(-1, block.length)
        rows = block.length - max(block.waiting - 1, 0)
        if self.family.direct:
            states = self.decoder(**arguments).last_hidden_state[:, -rows:]
            return self.head(states), states if hidden else None
        out = self.model(**arguments, logits_to_keep=rows, output_hidden_states=hidden)
        return out.logits, out.hidden_states[-1][:, -rows:] if hidden else None

    def _masks(self, memory: Memory, mask: Tensor | None, queries: Tensor) -> Any:
        kinds = self.layer_kinds
        if kinds == (FULL,) or mask is None:
            return mask
        if kinds == (SLIDING,):
            return memory.windowed(mask, queries)
        return {
            kind: mask
            if kind == FULL
            else memory.windowed(mask, queries)
            if kind == SLIDING
            else None  # recurrent layers take no mask: a block has no padding at batch 1
            for kind in kinds
        }

    def thinned(self, skip: Sequence[int], depth: int | None = None) -> Backbone:
        """The same weights with some decoder layers left out; they share the request's memory.

        `skip` lists layers to leave out; `depth` keeps only the first layers (early exit). The
        user's model is not touched: the thinner decoder is a shallow copy with its own layer list.
        """
        twin = copy.copy(self)
        twin.decoder = without_layers(self.decoder, skip, depth)
        if not self.family.direct:
            raise ValueError(
                f"layers of {type(self.model).__name__} cannot be left out: its logits are not "
                "head(decoder)"
            )
        return twin


def hide(memory: Memory, seen: Tensor) -> None:  # (B, L) 0 = hidden
    """Leave out slots of a prompt that nobody sees, also between others."""
    memory.bare = False
    memory.padding = tuple((seen == 0).sum(-1).tolist())
    memory.mask.hide_slots(seen)


def without_layers(decoder: Any, skip: Sequence[int], depth: int | None = None) -> Any:
    """A shallow copy of a decoder, weights shared, with its own list of layers."""
    layers = list(decoder.layers)[:depth]
    twin = copy.copy(decoder)
    twin._modules = dict(decoder._modules)
    left = [layer for index, layer in enumerate(layers) if index not in set(skip)]
    twin._modules["layers"] = nn.ModuleList(left)
    return twin


def leading(attention_mask: Tensor | None, batch: int) -> list[int]:
    """Left padding per row; raises ValueError for padding on the right."""
    if attention_mask is None:
        return [0] * batch
    if not bool(attention_mask[:, -1].all()):
        raise ValueError(
            "attention_mask (given, or told by the padding token) hides tokens after a prompt; pad "
            "on the left (processor.tokenizer.padding_side = 'left')"
        )
    pads: list[int] = (attention_mask.cumsum(-1) == 0).sum(-1).tolist()
    return pads


def padding(attention_mask: Tensor | None, batch: int) -> list[int]:
    """The same; raises ValueError for padding between tokens, too."""
    pads = leading(attention_mask, batch)
    if attention_mask is not None and int((attention_mask == 0).sum()) != sum(pads):
        raise ValueError(
            "attention_mask hides tokens inside a prompt, which cannot be left out here; drop them "
            "and pad on the left"
        )
    return pads


def next_rope(
    position_ids: Tensor | None, batch: int, length: int
) -> tuple[list[int], Tensor | None]:
    """Rotary position of the first token behind the prompt per row, and what each axis adds to it.

    As in `generate()` every axis goes on from the last column, whatever stood higher before: the
    frames of a long video pass the text behind it. The offsets (axes, B, 1) are None where all
    axes agree, and so wherever a prompt ends on text.
    """
    if position_ids is None:
        return [length] * batch, None
    last = position_ids[..., -1]
    if position_ids.dim() == 2:
        return [int(value) + 1 for value in last.expand(batch).tolist()], None
    axes = (last[1:] if len(last) > 3 else last).expand(
        -1, batch
    )  # the first of four is text order
    rope = [int(value) + 1 for value in axes[0].tolist()]
    offsets = axes - axes[:1]
    return rope, offsets[..., None] if bool(offsets.any()) else None


def takes_positions(model: Any) -> None:
    """Refuse a model that no drafted block can be placed in. Raises ValueError.

    A block stands behind what is kept, wherever rejected tokens were, so its positions and the
    cache are given by name. A wrapper that names no argument at all is left to the first request.
    """
    names = _hf.forward_names(model)
    missing = [name for name in ("position_ids", "past_key_values") if name not in names]
    if "input_ids" in names and missing:
        raise ValueError(
            f"{type(model).__name__} takes no {' and no '.join(missing)}, so a draft cannot be "
            "placed; use model.generate() for this model"
        )


def last_position_of(config: Any) -> int | None:
    """The last row of a table of positions; None where positions are computed (RoPE)."""
    if getattr(config, "rope_parameters", None) is not None:
        return None
    size = getattr(config, "max_position_embeddings", None)
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


def layer_kinds_of(config: Any) -> tuple[tuple[str, ...], int | None]:
    """Kinds of decoder layers that want different masks, and the sliding window if any."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise ValueError(
            f"{type(config).__name__} has local layers that see by slots, whatever a mask says, so "
            "a draft would be misread behind their window; use model.generate() for this model"
        )
    if types is None:
        return ((SLIDING,), window) if window else ((FULL,), None)
    kinds = tuple(sorted(set(types)))
    if "chunked_attention" in kinds:
        raise ValueError("chunked_attention layers have no tree mask here; use plain decoding")
    return kinds, window if SLIDING in kinds else None
