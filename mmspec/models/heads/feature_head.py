"""A feature head: one decoder layer that continues the hidden states of a target (EAGLE).

Li et al. 2024. It reads the next token beside the target's state behind the one before, and says
what the target's state behind that next token will be; the target's own output head turns that into
a law:

    slot t    fc([embedding of token t + 1 ; state of slot t]) -> layers -> state of slot t + 1

A *state* is what the target's output head sees: its last hidden state, behind the final norm. The
embedding table and the output head are the target's and are not kept here. Layers are Llama's, the
first without a norm in front of its attention, for every target; rotary positions count slots from
0. Parameter names are those of the public EAGLE-1 and EAGLE-2 checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from mmspec.models.llama_layers import LlamaLayers, through
from mmspec.models.reading import read

_SHAPE = (  # what a head has in common with the layers of its target
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "attention_bias", "initializer_range", "max_position_embeddings"),
)
_THETA = 10_000.0


class FeatureHeadConfig(LlamaConfig):
    """`hidden_size` and `vocab_size` are the target's; `bias` is that of `fc`."""

    model_type = "feature_head"

    num_hidden_layers: int = 1
    bias: bool = True

    @classmethod
    def of(cls, config: Any, vocabulary: int, **changes: Any) -> FeatureHeadConfig:
        """The configuration of a head for a decoder with this text configuration.

        `vocabulary` is what the target speaks: codes, for a model that draws.
        """
        shared = {name: getattr(config, name, None) for name in _SHAPE}
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or _THETA
        own = {
            **{name: value for name, value in shared.items() if value is not None},
            "hidden_size": config.hidden_size,
            "vocab_size": vocabulary,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        return cls(**{**own, **changes})


class FeatureHead(LlamaLayers):
    """Next tokens and the states before them to the states behind them."""

    config: FeatureHeadConfig
    config_class = FeatureHeadConfig
    _keys_to_ignore_on_load_unexpected = [r"embed_tokens\.weight"]  # noqa: RUF012

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        count = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, layer) for layer in count)
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        embeds: Tensor,
        states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """States (B, q, D) behind tokens, from their `embeds` and the `states` before, likewise.

        `attention_mask` is (B, L), or (1 or B, 1, q, L) and additive.
        """
        merged: Tensor = self.fc(torch.cat((embeds, states), -1))
        return through(
            self.layers,
            merged,
            lambda places: self.rotary_emb(merged, position_ids=places),
            config=self.config,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
        )


def load_head(folder: str | Path, dtype: torch.dtype | None = None) -> FeatureHead:
    """Read a head from a folder, as it was saved or in `dtype`.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: FeatureHead = read(FeatureHead, folder, "feature head", dtype)
    return loaded
