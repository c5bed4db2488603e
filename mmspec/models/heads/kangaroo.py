"""Kangaroo's adapter: one attention between the first layers of a target and its output head.

Liu et al. 2024. The state behind layer `exit_layer` of the target, before any norm, goes through
one attention with a norm in front, no MLP, and a norm; the target's output head makes a
distribution of it:

    layers 0 .. n - 1 of the target -> x + attention(norm(x)) -> norm -> the target's output head

Parameter names are those of the published checkpoints, which do not say how many layers they
stand on; rotary positions count slots from 0.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from mmspec.models.heads.state_head import StateHeadConfig
from mmspec.models.llama_layers import LlamaHead


class KangarooAdapterConfig(StateHeadConfig):
    """`hidden_size` and `vocab_size` are the target's; `exit_layer` layers of it run in front."""

    model_type = "kangaroo"
    chooses: ClassVar[frozenset[str]] = frozenset()

    num_hidden_layers: int = 1
    exit_layer: int = 2

    @classmethod
    def of(cls, config: Any, vocabulary: int, **changes: Any) -> Any:
        """The configuration of an adapter for a decoder with this text configuration.

        Two layers run in front, or one of a decoder of two.
        """
        layers = max(min(2, config.num_hidden_layers - 1), 1)
        return super().of(config, vocabulary, **{"exit_layer": layers, **changes})


class AttentionLayer(nn.Module):
    """Attention with a norm in front, and nothing behind."""

    def __init__(self, config: KangarooAdapterConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, 0)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, **read: object) -> Tensor:  # (B, q, D)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(states), **read)
        behind: Tensor = states + attended
        return behind


class KangarooAdapter(LlamaHead):
    """Early states of a target to what its output head reads."""

    config: KangarooAdapterConfig
    config_class = KangarooAdapterConfig

    def __init__(self, config: KangarooAdapterConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([AttentionLayer(config)])
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
        """What the output head reads (B, q, D), of early states (B, q, D).

        `attention_mask` is (B, L), or (1 or B, 1, q, L) and additive.
        """
        behind = self.behind(self.layers, states, attention_mask, position_ids, past_key_values)
        normed: Tensor = self.norm(behind)
        return normed
