"""The EAGLE-3 head: fused states of three target layers, one decoder layer, a draft vocabulary.

Li et al. 2025. Features are un-normed hidden states 2, L // 2 and L - 3 (Hugging Face indices) of a
target of L layers, concatenated; `fc` fuses them into one state, and later the head's own states
replace it:

    [h2 ; hL/2 ; hL-3] --fc--> g      a = [norm(embedding) ; norm(g)]
    out = r + MLP(norm(r)),  r = g + attention(a)         logits = lm_head(norm(out))

`out` is the next g, without `fc`. Later trainers (speculators, SpecForge) add norms, plain layers
after the first one, sliding windows and layers with normed queries and keys; see
`Eagle3HeadConfig`. The vocabulary may be a part of the target's (`DraftVocabulary`). Parameter
names are those of the public EAGLE-3 checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from mmspec.models.heads.draft_vocabulary import DraftVocabulary
from mmspec.models.heads.state_head import (
    ALL_FUSED,
    SlotMarks,
    SlotRotaryEmbedding,
    StateHead,
    StateHeadConfig,
    add_step_residual,
    step_table,
)
from mmspec.models.llama_layers import FULL, Layers
from mmspec.models.loading import load_model


class Eagle3HeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; `tapped_layers=None` are the published ones of the target.

    The draft vocabulary has `draft_vocab_size` tokens, None = all of `vocab_size`.
    `target_hidden_size` is the target's width if it differs from the head's: the head then has its
    own embedding table, and reads images as placeholders. `num_taps` hidden states are fused.

    Variants of the computation (False = as published), under the names of speculators:

    - `norm_before_residual`: the residual is norm(g) instead of g.
    - `norm_before_fc`: one norm over the concatenated features; `fc_norm`: one per feature.
    - `norm_output`: the next g is norm(out) instead of out.
    - `qk_norm`: layers of Qwen3, with normed queries and keys, instead of Llama's.
    """

    model_type = "eagle3_head"
    supported_slots: ClassVar[tuple[str, ...]] = ALL_FUSED

    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_taps: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if self.tapped_layers is not None and len(self.tapped_layers) != self.num_taps:
            raise ValueError(
                f"tapped_layers={list(self.tapped_layers)} does not have num_taps={self.num_taps} "
                "entries; make both agree"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc=True and fc_norm=True both norm the features; give one of them"
            )
        if self.qk_norm and self.layer_types is None:  # Qwen3's attention reads the list
            self.layer_types = [FULL] * self.num_hidden_layers
        if self.target_hidden_size not in (None, self.hidden_size) and self.visual_slots == "fused":
            raise ValueError(
                f"a head of width {self.hidden_size} cannot read image embeddings of width "
                f"{self.target_hidden_size}; give visual_slots='placeholder' or 'hidden'"
            )

    @property
    def has_embeddings(self) -> bool:
        """Whether the head has an embedding table of its own."""
        return self.target_hidden_size not in (None, self.hidden_size)


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads embedding and state, each with its own norm."""

    def __init__(self, config: Eagle3HeadConfig) -> None:
        super().__init__()
        width = config.hidden_size
        attention: Any = Qwen3Attention if config.qk_norm else LlamaAttention
        self.self_attn = attention(config, 0)
        for part in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, part).out_features
            wide = nn.Linear(2 * width, rows, bias=config.attention_bias)
            setattr(self.self_attn, part, wide)
        self.mlp = LlamaMLP(config)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(width, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.norm_before_residual = config.norm_before_residual

    def forward(self, states: Tensor, embeds: Tensor, **read: object) -> Tensor:  # (B, q, D)
        normed = self.hidden_norm(states)
        both = torch.cat((self.input_layernorm(embeds), normed), -1)
        residual = normed if self.norm_before_residual else states
        states = residual + self.self_attn(hidden_states=both, **read)[0]
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class FusedStateHead(DraftVocabulary, StateHead):
    """Maps next tokens and the fused states before them to the states of these tokens."""

    config: Eagle3HeadConfig
    _keys_to_ignore_on_load_unexpected = [r"embed_tokens\.weight"]  # noqa: RUF012

    def __init__(self, config: Eagle3HeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        features, eps = config.num_taps * self.feature_size, config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(features, eps=eps) if config.norm_before_fc else None
        norms = config.num_taps if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(self.feature_size, eps) for _ in range(norms))
        self.fc = nn.Linear(features, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        layer: Any = Qwen3DecoderLayer if config.qk_norm else LlamaDecoderLayer
        further = range(1, config.num_hidden_layers)
        self.layers = nn.ModuleDict({str(index): layer(config, index) for index in further})
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, self.draft_vocab_size, bias=False)
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, width) if config.has_embeddings else None
        )
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.step_residual = step_table(config)
        self.register_vocabulary()
        self.post_init()  # type: ignore[no-untyped-call]

    def taps(self, layers: int) -> tuple[int, ...]:
        own = self.config.tapped_layers
        return published_layers(layers) if own is None else tuple(own)

    @property
    def feature_size(self) -> int:
        return self.config.target_hidden_size or self.config.hidden_size

    @property
    def embeddings(self) -> nn.Module | None:
        return self.embed_tokens

    def fuse(self, features: Tensor) -> Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm:
            chunks = features.chunk(len(self.fc_norm), -1)
            pairs = zip(self.fc_norm, chunks, strict=True)
            features = torch.cat([norm(chunk) for norm, chunk in pairs], -1)
        fused: Tensor = self.fc(features)
        return fused

    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        inputs = add_step_residual(states, self.step_residual, marks.steps)
        return [partial(self.midlayer, embeds=embeds), *self.layers.values()], inputs

    def finish_states(self, states: Tensor) -> Tensor:
        return self.norm(states) if self.config.norm_output else states

    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        normed = states if self.config.norm_output else self.norm(states)
        logits: Tensor = self.lm_head(normed)
        return logits


class Eagle3Head(FusedStateHead):
    """A head that drafts one token per run, each from its own state of the token before."""

    config_class = Eagle3HeadConfig


def published_layers(layers: int) -> tuple[int, int, int]:
    """Hidden states 2, L // 2 and L - 3 of a target of L layers (Hugging Face indices).

    Clamped to 1 .. L, which only affects targets of fewer than 4 layers (reconstructed).
    """
    found = (min(max(at, 1), layers) for at in (2, layers // 2, layers - 3))
    low, middle, high = found
    return low, middle, high


def load_eagle3_head(folder: str | Path, dtype: torch.dtype | None = None) -> Eagle3Head:
    """Load a head from a folder, in the saved dtype or `dtype`.

    Raises ValueError where the folder holds another kind of model, or a damaged vocabulary map.
    """
    loaded: Eagle3Head = load_model(Eagle3Head, folder, "EAGLE-3 head", dtype)
    loaded.check()
    return loaded
