"""Run Llama's decoder layers in models with other inputs and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mmspec import _hf_cache

Layers = Iterable[Callable[..., Tensor]]


class LlamaLayers(PreTrainedModel):
    """Flags that transformers reads of a model made of Llama layers."""

    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["LlamaDecoderLayer"]  # noqa: RUF012


class LlamaHead(LlamaLayers):
    """Llama layers on hidden states of a target, rotated by `rotary_emb`."""

    config: Any
    rotary_emb: LlamaRotaryEmbedding

    @property
    def feature_size(self) -> int:
        """Width of one hidden state of the target."""
        return int(self.config.hidden_size)

    def run_layers(
        self,
        layers: Layers,
        states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """`through`, kept in `past_key_values` where that is given."""
        return run_decoder_layers(
            layers,
            states,
            lambda positions: self.rotary_emb(states, position_ids=positions),
            config=self.config,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
        )


def run_decoder_layers(
    layers: Layers,
    states: Tensor,
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    config: Any,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool | None,
) -> Tensor:
    """Run layers on states (B, q, D); `rotary` returns cosines and sines of positions.

    `attention_mask` is (B, L), or (1 or B, 1, q, L) and additive. Positions (1 or B, q), or several
    axes of them, need not be consecutive: only the mask controls attention.
    """
    if position_ids is None:
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        position_ids = torch.arange(start, start + states.shape[1], device=states.device)[None]
    shared: dict[str, Any] = {"position_ids": position_ids, _hf_cache.CACHE_NAME: past_key_values}
    mask: Any = attention_mask
    if mask is None or mask.dim() == 2:
        mask = create_causal_mask(config, states, attention_mask, past_key_values)
    embeddings = rotary(position_ids)
    for layer in layers:
        states = layer(
            states,
            attention_mask=mask,
            position_embeddings=embeddings,
            use_cache=use_cache,
            **shared,
        )
    return states
