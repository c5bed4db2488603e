"""The DREAM head: decoder layers on embeddings, with cross-attention to the target's states.

Hu et al. 2025. A first decoder layer without pre-norm reads embeddings, a gated cross-attention
reads the target's last hidden states, a second decoder layer and a norm follow, then the target's
output head:

    embeddings of tokens 0 .. t -> layer -> x + tanh(a) attention(x, states 0 .. t - 1) -> layer
                                              + tanh(b) MLP                   -> norm -> state t

Queries and keys of the cross-attention are normed and not rotated. Both gates are initialised to 0,
which disables the cross-attention. The first token, which has no previous state, attends to none
(in the release, to all later ones). Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    eager_attention_forward,
)

from mmspec import _hf_cache
from mmspec.models.heads.state_head import (
    ALL_FUSED,
    CHOICES,
    SlotMarks,
    SlotRotaryEmbedding,
    StateHead,
    StateHeadConfig,
    add_step_residual,
    step_table,
)
from mmspec.models.llama_layers import Layers
from mmspec.models.loading import load_model

UNSEEN = -3e4  # score of a masked key, before scaling; finite in float16


class DreamHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; the middle one of three layers attends to the target's states."""

    model_type = "dream_head"
    supported_choices: ClassVar[frozenset[str]] = CHOICES - {"sliding_window"}
    supported_slots: ClassVar[tuple[str, ...]] = ALL_FUSED

    num_hidden_layers: int = 3

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if self.num_hidden_layers != 3:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers}, but a DREAM head has 3; drop it"
            )


class StateAttention(nn.Module):
    """Cross-attention of the head's stream to the target's states, with the same mask.

    Slots without a state are masked by an extra key coordinate, which is added to the scores and
    cached with the keys; their values are zero.
    """

    is_causal = True

    def __init__(self, config: StateHeadConfig) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        shared = config.num_key_value_heads or heads
        self.head_dim: int = config.head_dim or width // heads
        self.config, self.layer_idx = config, 1
        self.num_key_value_groups = heads // shared
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shared * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shared * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.q_norm, self.k_norm = (
            LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) for _ in range(2)
        )

    def forward(
        self,
        own: Tensor,
        states: Tensor,
        stateless: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
    ) -> Tensor:  # (R, q, D)
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj(own), self.k_proj(states), self.v_proj(states))
        )
        query = functional.pad(self.q_norm(query), (0, 1), value=1.0)
        key = functional.pad(self.k_norm(key), (0, 1))
        if stateless is not None:
            hidden = stateless[:, None, :, None]
            key = torch.cat((key[..., :-1], key[..., -1:].masked_fill(hidden, UNSEEN)), -1)
            value = value.masked_fill(hidden, 0.0)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        scale = self.head_dim**-0.5
        attended, _ = attend(self, query, key, value, attention_mask, scaling=scale)
        out: Tensor = self.o_proj(attended.flatten(2))
        return out


class StateAttentionLayer(nn.Module):
    """Pre-norm cross-attention and MLP, each scaled by a gate."""

    def __init__(self, config: DreamHeadConfig) -> None:
        super().__init__()
        self.cross_attn = StateAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        own: Tensor,
        states: Tensor,
        stateless: Tensor | None,
        attention_mask: Tensor | None = None,
        **shared: Any,
    ) -> Tensor:  # (R, q, D)
        normed, cache = self.input_layernorm(own), shared.get(_hf_cache.CACHE_NAME)
        attended = self.cross_attn(normed, states, stateless, attention_mask, cache)
        own = own + self.cross_attn_attn_gate.tanh() * attended
        update = self.mlp(self.post_attention_layernorm(own))
        out: Tensor = own + self.cross_attn_mlp_gate.tanh() * update
        return out


class DreamHead(StateHead):
    """Maps tokens and the target's states before them to the states of these tokens."""

    config: DreamHeadConfig
    config_class = DreamHeadConfig
    _keys_to_ignore_on_load_unexpected = [r"embed_tokens\.weight"]  # noqa: RUF012

    def __init__(self, config: DreamHeadConfig) -> None:
        super().__init__(config)
        first, last = (LlamaDecoderLayer(config, layer) for layer in (0, 2))
        self.layers = nn.ModuleList([first, StateAttentionLayer(config), last])
        self.layers[0].input_layernorm = nn.Identity()
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.step_residual = step_table(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, StateAttentionLayer):
            module.cross_attn_attn_gate.zero_()
            module.cross_attn_mlp_gate.zero_()

    @property
    def has_first_slot(self) -> bool:
        return True

    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        return self._recording_layers([], states, marks), add_step_residual(
            embeds, self.step_residual, marks.steps
        )

    def forward_with_middle(
        self,
        embeds: Tensor,
        states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        marks: SlotMarks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """States (R, q, D) after the cross-attention, and after the head, as `forward`."""
        marks, middle = marks or SlotMarks(), list[Tensor]()
        inputs = add_step_residual(embeds, self.step_residual, marks.steps)
        layers = self._recording_layers(middle, states, marks)
        states = self.run_layers(layers, inputs, attention_mask, position_ids)
        return middle[0], states

    def _recording_layers(self, middle: list[Tensor], states: Tensor, marks: SlotMarks) -> Layers:
        """Return the layers; the cross-attention's outputs are appended to `middle`."""

        def attend(own: Tensor, **options: Any) -> Tensor:
            middle.append(self.layers[1](own, states, marks.stateless, **options))
            return middle[0]

        return [self.layers[0], attend, self.layers[2], lambda own, **_: self.norm(own)]


def load_dream_head(folder: str | Path, dtype: torch.dtype | None = None) -> DreamHead:
    """Load a head from a folder, in the saved dtype or `dtype`.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: DreamHead = load_model(DreamHead, folder, "DREAM head", dtype)
    return loaded
