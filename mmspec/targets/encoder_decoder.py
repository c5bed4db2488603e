"""Encoder-decoder models behind the same calls as a decoder-only backbone.

The encoder runs once, in prefill; its keys and values are kept beside the slots of the decoder and
are never rolled back. In a request, `input_ids` are the decoder's tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from mmspec import _hf
from mmspec.targets.backbone import ROOM
from mmspec.targets.cache import SlotCache
from mmspec.targets.family import Family
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.reader import Reader


class EncoderDecoder(Reader):
    """A sequence-to-sequence model with explicit decoder positions (Whisper and its like).

    Raises ValueError at construction for models that cannot be told positions (BART, T5): a drafted
    block would stand in the wrong place.
    """

    can_branch = True

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family, self.config = model, family, model.config
        if "decoder_position_ids" not in _hf.forward_names(model):
            raise ValueError(
                f"{type(model).__name__} takes no decoder_position_ids, so a draft cannot be "
                "placed; use plain decoding for this model"
            )
        self.cache_config = copy.deepcopy(model.config)
        self.cache_config.num_hidden_layers = model.config.decoder_layers
        SlotCache(self.cache_config)  # refuses layers that cannot roll back

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)

    def prefill(
        self, inputs: Mapping[str, Any], room: int
    ) -> tuple[Memory, Tensor, Mapping[str, Any]]:
        """Encode the source and read the decoder's prompt, which every row has in equal length."""
        ids = inputs["input_ids"]
        batch, length = ids.shape
        slots = SlotCache(self.cache_config, length + min(room, ROOM))
        slots.plan_uniform(0, length)
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        memory = Memory(slots, length, [0] * batch, [length] * batch, like)
        memory.last = self.config.max_target_positions - 1  # a table of positions
        memory.beside = EncoderDecoderCache(slots, DynamicCache(config=self.cache_config))
        memory.source = inputs.get("encoder_outputs")
        if memory.source is None:
            wanted = _hf.forward_names(self.model.get_encoder())
            given = {name: value for name, value in inputs.items() if name in wanted}
            given.pop("input_ids", None)
            memory.source = self.model.get_encoder()(**given, return_dict=True)
        positions = torch.arange(length, device=ids.device)[None].expand(batch, -1)
        out = self._forward(memory, ids, positions, None)
        return memory, out.logits[:, -1], out

    def read(
        self, memory: Memory, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block behind what `memory` keeps; as `Backbone.read`."""
        positions, mask, _ = memory.place(block)
        positions = positions.expand(block.tokens.shape[0], -1)
        out = self._forward(memory, block.tokens, positions, mask, hidden)
        rows = block.length - max(block.waiting - 1, 0)
        states = out.decoder_hidden_states[-1][:, -rows:] if hidden else None
        return out.logits[:, -rows:], states

    def thinned(self, skip: Sequence[int], depth: int | None = None) -> Reader:
        raise ValueError(f"layers of {type(self.model).__name__} cannot be left out")

    def _forward(
        self,
        memory: Memory,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        hidden: bool = False,
    ) -> Any:
        return self.model(
            encoder_outputs=memory.source,
            decoder_input_ids=ids,
            decoder_attention_mask=mask,
            decoder_position_ids=positions,
            past_key_values=memory.beside,
            use_cache=True,
            output_hidden_states=hidden,
            return_dict=True,
        )


def source_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A request in the form this module reads.

    Encoder inputs, and the decoder's tokens as `input_ids`.

    Without decoder tokens the decoder starts as the configuration says.
    """
    encoder = {
        name: value
        for name, value in inputs.items()
        if name
        not in ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    }
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    given = [name for name, value in encoder.items() if value is not None]
    if not given:
        wanted = model.get_encoder().main_input_name
        raise ValueError(f"there is nothing to encode; give {wanted}, as the processor makes it")
    if ids is None:
        outputs = encoder.get("encoder_outputs")
        carrier = outputs[0] if outputs is not None else encoder[given[0]]
        start = model.generation_config.decoder_start_token_id
        start = model.config.decoder_start_token_id if start is None else start
        ids = torch.full((carrier.shape[0], 1), start, device=carrier.device)
    return {**encoder, "input_ids": ids}
