"""The head of DREAM: embeddings go in, and a layer in the middle attends to the target's states.

Hu et al. 2025. Nothing is fused: a first decoder layer without a norm in front reads embeddings, a
gated cross-attention reads the target's last states, a second decoder layer and a norm follow; the
target's own output head turns that into a distribution:

    embeddings of tokens 0 .. t -> layer -> x + tanh(a) attention(x, states 0 .. t - 1) -> layer
                                              + tanh(b) MLP                   -> norm -> state t

Queries and keys of the cross-attention are normed and not rotated. Both gates begin at 0, where the
head hears nothing of the target. Of the first token, before which there is no state, it hears none
(the release lets it see all later ones). Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

from mmspec.models.heads.state_head import (
    SlotMarks,
    SlotRotaryEmbedding,
    StateHead,
    StateHeadConfig,
    step_table,
    stepped,
)
from mmspec.models.llama_layers import Layers
from mmspec.models.reading import read

UNSEEN = -3e4  # of a key that must not be seen, before scaling; finite in float16


class DreamHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; the middle one of three layers attends to the target's states."""

    model_type = "dream_head"

    num_hidden_layers: int = 3

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if self.num_hidden_layers != 3:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers}, but a DREAM head has 3; drop it"
            )
        if self.visual_slots in ("raw", "compressed"):
            raise ValueError(
                f"visual_slots={self.visual_slots!r} goes around a fusion, and a DREAM head fuses "
                "nothing; give 'fused', 'placeholder' or 'hidden', and visual_keep= to read fewer"
            )


class StateAttention(nn.Module):
    """Attention of the head's own stream to states; who sees which is up to the same mask.

    A slot without a state has a key that nobody sees: the last coordinate of keys is added to the
    scores, so it is remembered with them, and a value of zeros for the slot itself.
    """

    is_causal = True

    def __init__(self, config: DreamHeadConfig) -> None:
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
        heard, _ = attend(self, query, key, value, attention_mask, scaling=scale)
        out: Tensor = self.o_proj(heard.flatten(2))
        return out


class StateAttentionLayer(nn.Module):
    """Cross-attention and an MLP, each behind a norm and let in by a gate."""

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
        past_key_values: Cache | None = None,
        **_: object,
    ) -> Tensor:  # (R, q, D)
        normed = self.input_layernorm(own)
        heard = self.cross_attn(normed, states, stateless, attention_mask, past_key_values)
        own = own + self.cross_attn_attn_gate.tanh() * heard
        thought = self.mlp(self.post_attention_layernorm(own))
        behind: Tensor = own + self.cross_attn_mlp_gate.tanh() * thought
        return behind


class DreamHead(StateHead):
    """Tokens so far and the states before them to the states behind them."""

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
    def reads_first(self) -> bool:
        return True

    def entered(self, embeds: Tensor, states: Tensor, marks: SlotMarks) -> tuple[Layers, Tensor]:
        return self._noting([], states, marks), stepped(embeds, self.step_residual, marks.steps)

    def with_middle(
        self,
        embeds: Tensor,
        states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        marks: SlotMarks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """States (R, q, D) behind the cross-attention, and behind the head, as `forward`."""
        marks, middle = marks or SlotMarks(), list[Tensor]()
        inputs = stepped(embeds, self.step_residual, marks.steps)
        layers = self._noting(middle, states, marks)
        behind = self.behind(layers, inputs, attention_mask, position_ids)
        return middle[0], behind

    def _noting(self, middle: list[Tensor], states: Tensor, marks: SlotMarks) -> Layers:
        """Its layers, which note what the cross-attention gives."""

        def attending(own: Tensor, **how: Any) -> Tensor:
            middle.append(self.layers[1](own, states, marks.stateless, **how))
            return middle[0]

        return [self.layers[0], attending, self.layers[2], lambda own, **_: self.norm(own)]


def load_dream_head(folder: str | Path, dtype: torch.dtype | None = None) -> DreamHead:
    """Read a head from a folder, as it was saved or in `dtype`.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: DreamHead = read(DreamHead, folder, "DREAM head", dtype)
    return loaded
