"""Llama's decoder layers in models of our own, which differ in what they read and how it turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Layers = Iterable[Callable[..., Tensor]]


class LlamaLayers(PreTrainedModel):
    """What transformers wants to know of a model that is made of them."""

    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["LlamaDecoderLayer"]  # noqa: RUF012


class LlamaHead(LlamaLayers):
    """Layers on states of a target, which turn by `rotary_emb`."""

    config: Any
    rotary_emb: LlamaRotaryEmbedding

    @property
    def feature_size(self) -> int:
        """Width of one hidden state of the target."""
        return int(self.config.hidden_size)

    def behind(
        self,
        layers: Layers,
        states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """`through`, kept in `past_key_values` where that is given."""
        return through(
            layers,
            states,
            lambda places: self.rotary_emb(states, position_ids=places),
            config=self.config,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
        )


def through(
    layers: Layers,
    states: Tensor,
    turn: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    config: Any,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool | None,
) -> Tensor:
    """States (B, q, D) behind the layers; `turn` gives cosines and sines of positions.

    `attention_mask` is (B, L), or (1 or B, 1, q, L) and additive. Positions (1 or B, q), or several
    axes of them, may leap: who sees whom is up to the mask alone.
    """
    if position_ids is None:
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        position_ids = torch.arange(start, start + states.shape[1], device=states.device)[None]
    read: dict[str, Any] = {"position_ids": position_ids, "past_key_values": past_key_values}
    mask: Any = attention_mask
    if mask is None or mask.dim() == 2:
        mask = create_causal_mask(
            config=config,
            inputs_embeds=states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
    turned = turn(position_ids)
    for layer in layers:
        states = layer(
            states, attention_mask=mask, position_embeddings=turned, use_cache=use_cache, **read
        )
    return states
