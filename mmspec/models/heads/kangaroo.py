"""Kangaroo's adapter: one attention layer between the first layers of a target and its output head.

Liu et al. 2024. The un-normed state after layer `exit_layer` of the target goes through one
pre-norm attention without MLP and a norm, then through the target's output head:

    layers 0 .. n - 1 of the target -> x + attention(norm(x)) -> norm -> the target's output head

Parameter names are those of the published checkpoints, which lack the exit layer; rotary positions
count slots from 0.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from mmspec.models.heads.state_head import StateHeadConfig
from mmspec.models.llama_layers import LlamaHead


class KangarooAdapterConfig(StateHeadConfig):
    """`hidden_size` and `vocab_size` are the target's; `exit_layer` is its last layer that runs.

    `has_mlp` adds an MLP of width `intermediate_size` after the attention (FastVLM).
    """

    model_type = "kangaroo"
    supported_choices: ClassVar[frozenset[str]] = frozenset()

    num_hidden_layers: int = 1
    exit_layer: int = 2
    has_mlp: bool = False

    @classmethod
    def of(cls, config: Any, vocabulary: int, **changes: Any) -> Any:
        """Make the configuration of an adapter for a decoder with this text configuration.

        Default exit layer: 2, or 1 for decoders of two layers.
        """
        layers = max(min(2, config.num_hidden_layers - 1), 1)
        return super().of(config, vocabulary, **{"exit_layer": layers, **changes})


class AttentionLayer(nn.Module):
    """Pre-norm attention without MLP."""

    def __init__(self, config: StateHeadConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, 0)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, **read: object) -> Tensor:  # (B, q, D)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(states), **read)
        out: Tensor = states + attended
        return out


class KangarooAdapter(LlamaHead):
    """Maps early hidden states of a target to inputs of its output head."""

    config: KangarooAdapterConfig
    config_class = KangarooAdapterConfig

    def __init__(self, config: KangarooAdapterConfig) -> None:
        super().__init__(config)
        layer = LlamaDecoderLayer(config, 0) if config.has_mlp else AttentionLayer(config)
        self.layers = nn.ModuleList([layer])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Map early states (B, q, D) to inputs of the output head (B, q, D).

        `attention_mask` is (B, L), or (1 or B, 1, q, L) and additive.
        """
        states = self.run_layers(self.layers, states, attention_mask, position_ids, past_key_values)
        normed: Tensor = self.norm(states)
        return normed
