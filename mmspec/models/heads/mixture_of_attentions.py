"""The head of Mixture of Attentions: over layers, over the text, and over the target's states.

Zimmer et al. 2024, "Mixture of attentions for speculative decoding". Three attentions:

    over layers   of one token: its states after several layers of the target attend to each other,
                  in both directions, and are averaged to one state
    over text     embeddings of all tokens, drafted ones included, causal
    across        from the text to the averaged states of all tokens that the target has read

    slot        b|a   c|b   d|c  [e|-   f|-]      token t + 1 | state of token t, e and f drafted
    predicts                 e     f     g        the last state that e and f can read is that of c

So a draft never reads states that the head made up (it is on-policy), and states are averaged once
per token. A norm and the target's output head follow. Left out: inference by the target's last
layers (the paper's N > 0). Reconstructed: states of `num_taps` layers, not the keys and values of
all; no rotation in the cross-attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from mmspec import _hf_cache
from mmspec.errors import check_number
from mmspec.models.heads.dream import StateAttention
from mmspec.models.heads.kangaroo import AttentionLayer
from mmspec.models.heads.state_head import (
    ALL_FUSED,
    SlotMarks,
    SlotRotaryEmbedding,
    StateHead,
    StateHeadConfig,
)
from mmspec.models.llama_layers import Layers

MAX_TAPS = 1024


class MixtureOfAttentionsConfig(StateHeadConfig):
    """As `StateHeadConfig`; `num_taps` layers of the target are read, the last one included.

    They are evenly spread, unless `tapped_layers` lists them.
    """

    model_type = "mixture_of_attentions"
    supported_choices: ClassVar[frozenset[str]] = frozenset(
        ("tapped_layers", "visual_slots", "positions", "visual_keep")
    )
    supported_slots: ClassVar[tuple[str, ...]] = ALL_FUSED

    num_hidden_layers: int = 2
    num_taps: int = 3

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_number("num_taps", self.num_taps, 1, MAX_TAPS, whole=True)
        if self.num_hidden_layers != 2:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers}, but this head has 2 with a cache: "
                "over the text and across; drop it"
            )
        if self.tapped_layers is not None and len(self.tapped_layers) != self.num_taps:
            raise ValueError(
                f"tapped_layers={list(self.tapped_layers)} does not have num_taps={self.num_taps} "
                "entries; make both agree"
            )


class LayerAttention(nn.Module):
    """Self-attention over the layers of one token, and their mean."""

    def __init__(self, config: MixtureOfAttentionsConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.layers = nn.Parameter(torch.zeros(config.num_taps, width))
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:  # (..., k * D) -> (..., D)
        states = features.unflatten(-1, (len(self.layers), -1)) + self.layers
        parts = self.qkv_proj(self.norm(states)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (one.transpose(-2, -3) for one in parts.unbind(-3))
        attended = functional.scaled_dot_product_attention(query, key, value)  # (.., heads, k, w)
        averaged: Tensor = (states + self.o_proj(attended.transpose(-2, -3).flatten(-2))).mean(-2)
        return averaged


class CrossAttentionLayer(nn.Module):
    """Pre-norm cross-attention to the target's states, and an MLP."""

    def __init__(self, config: MixtureOfAttentionsConfig) -> None:
        super().__init__()
        self.cross_attn = StateAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.state_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )

    def forward(
        self,
        own: Tensor,
        states: Tensor,
        stateless: Tensor | None,
        attention_mask: Tensor | None = None,
        **shared: Any,
    ) -> Tensor:  # (R, q, D)
        given = (self.input_layernorm(own), self.state_layernorm(states), stateless)
        cache = shared.get(_hf_cache.CACHE_NAME)
        own = own + self.cross_attn(*given, attention_mask, cache)
        out: Tensor = own + self.mlp(self.post_attention_layernorm(own))
        return out


class MixtureOfAttentions(StateHead):
    """Maps tokens, and the states of those that the target has read, to states of these tokens."""

    config: MixtureOfAttentionsConfig
    config_class = MixtureOfAttentionsConfig

    def __init__(self, config: MixtureOfAttentionsConfig) -> None:
        super().__init__(config)
        self.layer_attention = LayerAttention(config)
        self.text_attention = AttentionLayer(config)
        self.cross_attention = CrossAttentionLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, LayerAttention):
            module.layers.normal_(0.0, self.config.initializer_range)

    def taps(self, layers: int) -> tuple[int, ...]:
        own, count = self.config.tapped_layers, self.config.num_taps
        if own is not None:
            return tuple(own)
        return tuple(max(round(layers * (at + 1) / count), 1) for at in range(count))

    def fuse(self, features: Tensor) -> Tensor:
        averaged: Tensor = self.layer_attention(features)
        return averaged

    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        """The states of drafted slots, which are the head's own, are not read."""
        stateless = None if isinstance(marks.steps, int) else marks.steps > 0
        across = partial(self.cross_attention, states=states, stateless=stateless)
        return [self.text_attention, across], embeds

    def finish_states(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states)
        return normed
