"""Readers of encoder-decoder models, with the calls of a decoder-only backbone.

The encoder runs once, in prefill; its keys and values are stored apart from the decoder's slots and
are never rolled back. In a request, `input_ids` are the decoder's tokens; text for the encoder is
given as `source_ids` or `source_embeds`, and `source_mask` masks its padding.
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
from mmspec.errors import first_line, is_of_library
from mmspec.targets.cache import SlotCache, last_position_of
from mmspec.targets.memory import Memory, RowMemories, TokenBlock
from mmspec.targets.readers.backbone import MAX_RESERVED_SLOTS, Backbone
from mmspec.targets.readers.reader import USES, Family, Reader
from mmspec.targets.tokens.context import Request

# inputs of the encoder in a request, and their names in a model
SOURCE = {
    "source_ids": "input_ids",
    "source_embeds": "inputs_embeds",
    "source_mask": "attention_mask",
}


class EncoderDecoder(Reader):
    """A sequence-to-sequence model.

    With explicit decoder positions (Whisper) blocks are placed as in a `Backbone`. Without (BART,
    T5) chains are read row by row, each as the model's own step of several tokens, which takes
    positions from the cache.
    Raises ValueError at construction for a cache that cannot roll back.
    """

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family = model, family
        self.config = model.config.get_text_config(decoder=True)
        self.configuration = model.config.to_json_string(use_diff=False)
        self.cache_config = copy.copy(self.config)  # `get_text_config` copies at every call
        self.cache_config.is_encoder_decoder = False  # for its decoder
        self.names, self.cache_name = _hf.forward_names(model), _hf.cache_name(model)
        self.is_placed = "decoder_position_ids" in self.names
        self._slots = SlotCache(self.cache_config)  # an empty template
        self.can_branch = self.is_placed and self._slots.can_branch
        self.obstacle = None if self.can_branch else "takes no decoder_position_ids"
        self.stepwise = set[str]() if self.is_placed else set(USES)

    def prefill(
        self, inputs: Mapping[str, Any], extra_slots: int, scored: int = 1
    ) -> tuple[Memory | RowMemories, Tensor, Mapping[str, Any]]:
        """Encode the source and read the decoder's prompt, of equal length in every row.

        The output holds logits of all positions, including the last `scored` ones.
        """
        ids = inputs["input_ids"]
        batch, length = ids.shape
        kept = self._slots
        slots = kept.make_empty() if kept.can_branch else SlotCache(self.cache_config)
        slots.plan.capacity = length + min(extra_slots, MAX_RESERVED_SLOTS)
        slots.plan_uniform(0, length)
        source, mask = self.encode_source(inputs), inputs.get("source_mask")
        memory = self._memory(slots, length, batch, source, mask)
        positions = torch.arange(length, device=ids.device)[None].expand(batch, -1)
        out = self._forward(memory, ids, positions, None)
        memory.is_stepwise = USES[batch > 1] in self.stepwise
        if batch == 1 or not memory.is_stepwise:
            return memory, out.logits[:, -1], out
        rows = [self._row(memory, length, row) for row in range(batch)]
        return RowMemories(rows), out.logits[:, -1], out

    def model_inputs(self, inputs: Mapping[str, Any], memory: Any) -> Mapping[str, Any]:
        """The request as inputs of the model's own preparation, with encoded source."""
        encoded = {"encoder_outputs": self.encode_source(inputs)}
        mask = inputs.get("source_mask")
        return {"input_ids": inputs["input_ids"], "attention_mask": mask, **encoded}

    def read(
        self, memory: Memory | RowMemories, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block; as `Backbone.read`."""
        if isinstance(memory, RowMemories):
            return self.read_rows(memory, block, hidden)
        if memory.is_stepwise:
            positions, mask = memory.place_step(block)[0], None
        else:
            positions, mask, _ = memory.place(block)
            if mask is not None:  # some join it to the source mask, which has all rows
                mask = mask.expand(block.tokens.shape[0], -1, -1, -1)
        positions = positions.expand(block.tokens.shape[0], -1)
        out = self._forward(memory, block.tokens, positions, mask, hidden)
        rows = block.length - max(block.waiting - 1, 0)
        states = out.decoder_hidden_states[-1][:, -rows:] if hidden else None
        return out.logits[:, -rows:], states

    def skip_layers(self, skip: Sequence[int], depth: int | None = None) -> Reader:
        raise self._layers_error()

    @property
    def layers(self) -> Sequence[nn.Module]:
        raise self._layers_error()

    def _layers_error(self) -> ValueError:
        return ValueError(
            f"{type(self.model).__name__} is an encoder-decoder, whose layers cannot be skipped or "
            "shared with a drafter; use a draft model, or prompt-lookup"
        )

    def encode_source(self, inputs: Mapping[str, Any]) -> Any:
        """The encoder outputs of the request, computed unless given."""
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
        memory.max_position = last_position_of(self.config)
        memory.model_cache = EncoderDecoderCache(slots, DynamicCache())
        memory.source, memory.step_inputs = source, {} if mask is None else {"attention_mask": mask}
        return memory

    def _row(self, memory: Memory, length: int, row: int) -> Memory:
        """The memory of one row, with its encoder and decoder states."""
        one = slice(row, row + 1)
        source = type(memory.source)(last_hidden_state=memory.source[0][one])
        mask = memory.step_inputs.get("attention_mask")
        own = self._memory(
            memory.cache.row(self.cache_config, row),
            length,
            1,
            source,
            None if mask is None else mask[one],
        )
        own.is_stepwise = True
        crossed, other = (
            memory.model_cache.cross_attention_cache,
            own.model_cache.cross_attention_cache,
        )
        for at, layer in enumerate(crossed.layers):
            if layer.is_initialized:
                other.update(layer.keys[one], layer.values[one], at)
                own.model_cache.is_updated[at] = True
        return own

    def _forward(
        self,
        memory: Memory,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        hidden: bool = False,
    ) -> Any:
        placed = {self.cache_name: memory.model_cache}
        if self.is_placed:
            placed["decoder_position_ids"] = positions
        return self.model(
            encoder_outputs=memory.source,
            decoder_input_ids=ids,
            decoder_attention_mask=mask,
            use_cache=True,
            output_hidden_states=hidden,
            return_dict=True,
            **placed,
            **memory.step_inputs,
        )


def encode_shared_source(reader: Reader, inputs: Mapping[str, Any]) -> Any:
    """Encode the source of a request once, for target and drafter."""
    assert isinstance(reader, EncoderDecoder)  # checked when the recipe was bound
    return reader.encode_source(inputs)


def add_source(request: Request, offer: Mapping[str, Any]) -> Request:
    """The request with the `source_of` it, where that is offered."""
    if "source" not in offer:
        return request
    return replace(request, inputs={**request.inputs, "encoder_outputs": offer["source"]})


def source_inputs(
    model: Any, inputs: Mapping[str, Any], config: GenerationConfig | None = None
) -> dict[str, Any]:
    """Convert a request to the form of this module: the decoder's tokens as `input_ids`.

    Ids and embeddings are the encoder's if it reads text. With `config` the decoder prompt is that
    of `generate()` with these settings; without, it is `decoder_input_ids`. Raises ValueError for
    decoder prompts of different lengths.
    """
    first, seen = inputs.get("decoder_input_ids"), inputs.get("decoder_attention_mask")
    if seen is not None and not bool(seen.all()):
        raise ValueError(
            "decoder_attention_mask hides tokens of some rows, but decoder prompts must have equal "
            "length; generate row by row"
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
        first = _hf.make_decoder_prompt(model, config, first, len(source), source.device)
    return {**made, "input_ids": first}


def source_carrier(inputs: Mapping[str, Any]) -> Tensor:
    """A tensor of the source, for its rows and device. Raises ValueError without a source."""
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


def refuse_if_readable(
    reader: Backbone | EncoderDecoder, inputs: Mapping[str, Any], error: Exception
) -> None:
    """Raise ValueError if only mmspec cannot read a prompt; otherwise the request is invalid."""
    is_ours = isinstance(error, ValueError) and not is_of_library(error)
    if is_ours or inputs.get("input_ids") is None:
        return
    given = dict(reader.model_inputs(inputs, None))
    if isinstance(reader, EncoderDecoder):
        given["decoder_input_ids"] = given.pop("input_ids")
    try:
        reader.model.generate(**given, max_new_tokens=1, do_sample=False)
    except Exception:  # the model cannot read it either; its own error is raised
        return
    raise ValueError(
        f"{type(reader.model).__name__} cannot be read with a cache that rolls back "
        f"({first_line(error)}); use model.generate() for this model"
    ) from error
