"""One Hugging Face model as the engine sees it: read a prompt, then read blocks behind it.

Families differ in few things, and those are data (`Family`); the modelling code is never copied.
Prefill goes through the model's own preparation, so positions, image features and masks are the
family's own; blocks go through the text decoder with explicit positions and an explicit mask.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmspec import _hf
from mmspec.targets.cache import SlotCache
from mmspec.targets.family import Family
from mmspec.targets.memory import Block, Memory, Rows
from mmspec.targets.reader import Reader

FULL, SLIDING = "full_attention", "sliding_attention"
ROOM = 1024  # most slots set aside at once behind a prompt; buffers double when they are full


class Backbone(Reader):
    """A causal model with its family; holds no state of any request.

    Raises ValueError at construction for what cannot work: a cache that cannot roll back, an
    attention kernel that takes no mask, layer kinds whose mask is unknown.
    """

    def __init__(self, model: Any, family: Family) -> None:
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
        self, inputs: Mapping[str, Any], room: int
    ) -> tuple[Memory | Rows, Tensor, Mapping[str, Any]]:
        """Read the prompt. Returns its memory, the next-token logits (B, V) and the model's output.

        `inputs` are the processor's tensors, left-padded; `room` is how many slots may be
        needed behind them.
        """
        prepared = _hf.prefill_inputs(self.model, inputs, SlotCache(self.cache_config))
        cache: SlotCache = prepared["past_key_values"]
        carrier = prepared.get("input_ids")
        carrier = prepared["inputs_embeds"] if carrier is None else carrier
        batch, length = carrier.shape[:2]
        cache.plan.capacity = length + min(room, ROOM)
        cache.plan_uniform(0, length)
        out = self.model(**prepared, return_dict=True)
        pads = padding(inputs.get("attention_mask"), batch)
        rope = next_rope(prepared.get("position_ids"), batch, length)
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        how = (like, self.window, self.bare)
        if batch == 1 or self.can_branch:
            return Memory(cache, length, pads, rope, *how), out.logits[:, -1], out
        rows = []
        for row in range(batch):
            own = cache.row(self.cache_config, row)
            rows.append(Memory(own, length, pads[row : row + 1], rope[row : row + 1], *how))
        return Rows(rows), out.logits[:, -1], out

    def read(
        self, memory: Memory | Rows, block: Block, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block behind what `memory` keeps. One forward.

        Returns logits (B, 1 + N, V) of the last waiting token and of every draft node, (B, N, V)
        where nothing waits, and the last hidden states of the same places when asked for. Nothing
        is kept until `memory.commit`.
        """
        if isinstance(memory, Rows):
            pieces = [self.read(row, block.row(i), hidden) for i, row in enumerate(memory.rows)]
            states = [state for _, state in pieces if state is not None]
            return torch.cat([logits for logits, _ in pieces]), torch.cat(
                states
            ) if hidden else None
        positions, mask, queries = memory.place(block)
        if self.family.rope_axes > 1:
            batch = block.tokens.shape[0]
            positions = positions.expand(self.family.rope_axes, batch, -1)
        arguments = {
            "input_ids": block.tokens if block.embeds is None else None,
            "inputs_embeds": None if block.embeds is None else block.embedded(self.embed),
            "attention_mask": self._masks(memory, mask, queries),
            "position_ids": positions,
            "past_key_values": memory.cache,
            "use_cache": True,
        }
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


def without_layers(decoder: Any, skip: Sequence[int], depth: int | None = None) -> Any:
    """A shallow copy of a decoder, weights shared, with its own list of layers."""
    layers = list(decoder.layers)[:depth]
    twin = copy.copy(decoder)
    twin._modules = dict(decoder._modules)
    left = [layer for index, layer in enumerate(layers) if index not in set(skip)]
    twin._modules["layers"] = nn.ModuleList(left)
    return twin


def padding(attention_mask: Tensor | None, batch: int) -> list[int]:
    """Left padding per row; raises ValueError for padding on the right or in between."""
    if attention_mask is None:
        return [0] * batch
    pads = (attention_mask == 0).sum(-1)
    leading = (attention_mask.cumsum(-1) == 0).sum(-1)
    if not torch.equal(pads, leading):
        raise ValueError(
            "attention_mask hides tokens inside or after a prompt; pad on the left "
            "(processor.tokenizer.padding_side = 'left')"
        )
    return [int(pad) for pad in pads.tolist()]


def next_rope(position_ids: Tensor | None, batch: int, length: int) -> list[int]:
    """Rotary position of the first token behind the prompt, per row."""
    if position_ids is None:
        return [length] * batch
    if position_ids.dim() == 3:  # (1 + axes or axes, B, L): the first of four rows is text order
        axes = position_ids[1:] if position_ids.shape[0] > 3 else position_ids
        last = axes.amax((0, 2))
    else:
        last = position_ids.amax(-1)
    return [int(value) + 1 for value in last.expand(batch).tolist()]


def layer_kinds_of(config: Any) -> tuple[tuple[str, ...], int | None]:
    """Kinds of decoder layers that want different masks, and the sliding window if any."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return ((SLIDING,), window) if window else ((FULL,), None)
    kinds = tuple(sorted(set(types)))
    if "chunked_attention" in kinds:
        raise ValueError("chunked_attention layers have no tree mask here; use plain decoding")
    return kinds, window if SLIDING in kinds else None
