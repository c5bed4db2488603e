"""Run Llama's decoder layers in models with other inputs and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mmspec import _hf_cache

Layers = Iterable[Callable[..., Tensor]]
AttentionMask = Tensor | Mapping[str, Tensor] | None  # a mapping: by the kind of a layer
FULL, SLIDING = "full_attention", "sliding_attention"


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
        attention_mask: AttentionMask = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """`run_decoder_layers`, cached in `past_key_values` where that is given."""
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
    attention_mask: AttentionMask,
    position_ids: Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool | None,
) -> Tensor:
    """Run layers on states (B, q, D); `rotary` returns cosines and sines of positions.

    `attention_mask` is (B, L), or (1 or B, 1, q, L) and additive; of layers with a sliding window,
    a mapping of additive ones (`mask_by_kind`). Positions (1 or B, q), or several axes of them,
    need not be consecutive: only the mask controls attention. Raises ValueError for one additive
    mask of layers with windows.
    """
    if position_ids is None:
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        position_ids = torch.arange(start, start + states.shape[1], device=states.device)[None]
    shared: dict[str, Any] = {"position_ids": position_ids, _hf_cache.CACHE_NAME: past_key_values}
    embeddings = rotary(position_ids)
    masks = _layer_masks(config, states, attention_mask, past_key_values)
    for layer, mask in zip(layers, masks, strict=False):
        states = layer(
            states,
            attention_mask=mask,
            position_embeddings=embeddings,
            use_cache=use_cache,
            **shared,
        )
    return states


def sliding_layers(config: Any) -> Sequence[str]:
    """Return the kind of every layer of a configuration with a sliding window, else nothing."""
    if getattr(config, "sliding_window", None) is None:
        return ()
    kinds: Sequence[str] = config.layer_types
    return kinds


def mask_by_kind(config: Any, mask: Tensor, queries: Tensor, keys: Tensor) -> AttentionMask:
    """Add the sliding window of a configuration to an additive mask (R, 1, q, k).

    `queries` (q,) and `keys` (k,), or (R, q) and (R, k), are slots; a key `sliding_window` or more
    before its query is masked in sliding layers. Without a window the mask itself is returned.
    """
    if not sliding_layers(config):
        return mask
    far = keys[..., None, :] <= queries[..., None] - config.sliding_window
    far = far if far.dim() == 2 else far[:, None]
    return {FULL: mask, SLIDING: mask.masked_fill(far, torch.finfo(mask.dtype).min)}


def _layer_masks(config: Any, states: Tensor, mask: Any, cache: Cache | None) -> Iterable[Any]:
    """The mask of each layer."""
    kinds, is_made = sliding_layers(config), isinstance(mask, Tensor) and mask.dim() == 4
    if not kinds:
        return repeat(mask if is_made else create_causal_mask(config, states, mask, cache))
    if is_made:
        raise ValueError(
            f"one mask cannot serve layers with sliding_window={config.sliding_window}; give the "
            "masks of mask_by_kind()"
        )
    if isinstance(mask, Mapping):
        return [mask[kind] for kind in kinds]
    makers = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}
    made = {kind: makers[kind](config, states, mask, cache) for kind in set(kinds)}
    return [made[kind] for kind in kinds]
