"""Encoder-decoder models behind the same calls as a decoder-only backbone.

The encoder runs once, in prefill; its keys and values are kept beside the slots of the decoder and
are never rolled back. In a request, `input_ids` are the decoder's tokens; words that the encoder
reads are `source_ids` or `source_embeds`, and `source_mask` hides their padding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

from mmspec import _hf
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, RowMemories, TokenBlock
from mmspec.targets.readers.backbone import ROOM, last_position_of
from mmspec.targets.readers.family import Family
from mmspec.targets.readers.reader import USES, Reader, step
from mmspec.targets.tokens.context import Request

# what the encoder reads of a prompt, and how a model calls it
SOURCE = {
    "source_ids": "input_ids",
    "source_embeds": "inputs_embeds",
    "source_mask": "attention_mask",
}


class EncoderDecoder(Reader):
    """A sequence-to-sequence model.

    With explicit decoder positions (Whisper) blocks are placed as those of a `Backbone`. Without
    (BART, T5) chains are read row by row, each as the model's own step of several tokens: it then
    counts positions from the cache.
    Raises ValueError at construction for a cache that cannot roll back.
    """

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family = model, family
        self.config = model.config.get_text_config(decoder=True)
        self.configuration = model.config.to_json_string(use_diff=False)
        self.cache_config = copy.copy(self.config)  # one that is not copied whenever it is asked
        self.cache_config.is_encoder_decoder = False  # for its decoder
        self.names = _hf.forward_names(model)
        self.is_placed = "decoder_position_ids" in self.names
        self._slots = SlotCache(self.cache_config)  # an empty one, to take others after
        self.can_branch = self.is_placed and self._slots.can_branch
        self.obstacle = None if self.can_branch else "takes no decoder_position_ids"
        self.stepwise = set[str]() if self.is_placed else set(USES)

    def prefill(
        self, inputs: Mapping[str, Any], room: int, scored: int = 1
    ) -> tuple[Memory | RowMemories, Tensor, Mapping[str, Any]]:
        """Encode the source and read the decoder's prompt, which every row has in equal length.

        The output holds logits of all places, so of the last `scored` ones.
        """
        ids = inputs["input_ids"]
        batch, length = ids.shape
        kept = self._slots
        slots = kept.emptied() if kept.can_branch else SlotCache(self.cache_config)
        slots.plan.capacity = length + min(room, ROOM)
        slots.plan_uniform(0, length)
        source, mask = self.encoded(inputs), inputs.get("source_mask")
        memory = self._memory(slots, length, batch, source, mask)
        positions = torch.arange(length, device=ids.device)[None].expand(batch, -1)
        out = self._forward(memory, ids, positions, None)
        memory.is_stepwise = USES[batch > 1] in self.stepwise
        if batch == 1 or not memory.is_stepwise:
            return memory, out.logits[:, -1], out
        rows = [self._row(memory, length, row) for row in range(batch)]
        return RowMemories(rows), out.logits[:, -1], out

    def own_inputs(self, inputs: Mapping[str, Any], memory: Any) -> Mapping[str, Any]:
        """A request as the model's own preparation takes it, its source encoded."""
        encoded = {"encoder_outputs": self.encoded(inputs)}
        mask = inputs.get("source_mask")
        return {"input_ids": inputs["input_ids"], "attention_mask": mask, **encoded}

    def read(
        self, memory: Memory | RowMemories, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block behind what `memory` keeps; as `Backbone.read`."""
        if isinstance(memory, RowMemories):
            return self.read_rows(memory, block, hidden)
        if memory.is_stepwise:
            positions, mask = step(memory, block)[0], None
        else:
            positions, mask, _ = memory.place(block)
            if mask is not None:  # some join it to that of the source, which has every row
                mask = mask.expand(block.tokens.shape[0], -1, -1, -1)
        positions = positions.expand(block.tokens.shape[0], -1)
        out = self._forward(memory, block.tokens, positions, mask, hidden)
        rows = block.length - max(block.waiting - 1, 0)
        states = out.decoder_hidden_states[-1][:, -rows:] if hidden else None
        return out.logits[:, -rows:], states

    def thinned(self, skip: Sequence[int], depth: int | None = None) -> Reader:
        raise self._whole()

    @property
    def layers(self) -> Sequence[nn.Module]:
        raise self._whole()

    def _whole(self) -> ValueError:
        return ValueError(
            f"{type(self.model).__name__} reads its source in an encoder, and its layers cannot be "
            "left out or shared with a draft; use a draft model, or prompt-lookup"
        )

    def encoded(self, inputs: Mapping[str, Any]) -> Any:
        """What the encoder makes of the source, or what the request brings along."""
        if inputs.get("encoder_outputs") is not None:
            return inputs["encoder_outputs"]
        given = {name: value for name, value in inputs.items() if name not in SOURCE}
        given |= {own: inputs.get(name) for name, own in SOURCE.items()}
        return _hf.encode_source(self.model, given)

    def _memory(
        self, slots: SlotCache, length: int, batch: int, source: Any, mask: Tensor | None
    ) -> Memory:
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        memory = Memory(slots, length, [0] * batch, [length] * batch, like)
        memory.last = last_position_of(self.config)
        memory.beside = EncoderDecoderCache(slots, DynamicCache())
        memory.source, memory.carried = source, {} if mask is None else {"attention_mask": mask}
        return memory

    def _row(self, memory: Memory, length: int, row: int) -> Memory:
        """One row's own memory, with what encoder and decoder have said so far."""
        one = slice(row, row + 1)
        source = type(memory.source)(last_hidden_state=memory.source[0][one])
        mask = memory.carried.get("attention_mask")
        own = self._memory(
            memory.cache.row(self.cache_config, row),
            length,
            1,
            source,
            None if mask is None else mask[one],
        )
        own.is_stepwise = True
        crossed, other = memory.beside.cross_attention_cache, own.beside.cross_attention_cache
        for at, layer in enumerate(crossed.layers):
            if layer.is_initialized:
                other.update(layer.keys[one], layer.values[one], at)
                own.beside.is_updated[at] = True
        return own

    def _forward(
        self,
        memory: Memory,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        hidden: bool = False,
    ) -> Any:
        placed = {"decoder_position_ids": positions} if self.is_placed else {}
        return self.model(
            encoder_outputs=memory.source,
            decoder_input_ids=ids,
            decoder_attention_mask=mask,
            past_key_values=memory.beside,
            use_cache=True,
            output_hidden_states=hidden,
            return_dict=True,
            **placed,
            **memory.carried,
        )


def source_of(reader: Reader, inputs: Mapping[str, Any]) -> Any:
    """What the encoder makes of a request's source, for all that read it."""
    assert isinstance(reader, EncoderDecoder)  # or nobody could share it
    return reader.encoded(inputs)


def with_source(request: Request, offer: Mapping[str, Any]) -> Request:
    """The request with the `source_of` it, where that is offered."""
    if "source" not in offer:
        return request
    return replace(request, inputs={**request.inputs, "encoder_outputs": offer["source"]})


def source_inputs(
    model: Any, inputs: Mapping[str, Any], config: GenerationConfig | None = None
) -> dict[str, Any]:
    """A request in the form this module reads: the decoder's tokens as `input_ids`.

    Words and embeddings are the encoder's where it reads words. With `config` the decoder begins as
    `generate()` has it begin under these settings; without, `decoder_input_ids` are all it reads.
    Raises ValueError for decoder tokens that some rows do not have.
    """
    first, seen = inputs.get("decoder_input_ids"), inputs.get("decoder_attention_mask")
    if seen is not None and not bool(seen.all()):
        raise ValueError(
            "decoder_attention_mask hides tokens of some rows, but a decoder's prompt is read in "
            "equal length here; ask row by row"
        )
    ids, embeds, mask = (inputs.get(own) for own in SOURCE.values())
    if model.main_input_name != "input_ids":
        first, ids = ids if first is None else first, None
    elif inputs.get("encoder_outputs") is not None:
        ids = embeds = None
    taken = (*SOURCE.values(), "decoder_input_ids", "decoder_attention_mask")
    rest = {name: value for name, value in inputs.items() if name not in taken}
    made = {"source_ids": ids, "source_embeds": embeds, **rest, "source_mask": mask}
    made = {name: value for name, value in made.items() if value is not None}
    if config is not None:
        source = source_carrier(made)
        first = _hf.decoder_prompt(model, config, first, len(source), source.device)
    return {**made, "input_ids": first}


def source_carrier(inputs: Mapping[str, Any]) -> Tensor:
    """What tells the rows of a request's source. Raises ValueError where there is no source."""
    if inputs.get("encoder_outputs") is not None:
        states: Tensor = inputs["encoder_outputs"][0]
        return states
    found = next((value for value in inputs.values() if isinstance(value, Tensor)), None)
    if found is None:
        raise ValueError(
            "there is nothing to encode; give input_features or input_ids, as the processor makes "
            "them"
        )
    return found
