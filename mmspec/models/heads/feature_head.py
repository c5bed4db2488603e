"""A feature head: one decoder layer that continues the hidden states of a target (EAGLE).

Li et al. 2024. It reads the embedding of the next token and the target's state of the token before,
and predicts the target's state of that next token; the target's output head follows:

    slot t    fc([embedding of token t + 1 ; state of slot t]) -> layers -> state of slot t + 1

A *state* is the input of the target's output head: its last hidden state, after the final norm.
Embedding table and output head are the target's. Layers are Llama's for every target, the first
without an input norm; rotary positions count slots from 0 by default. Parameter names are those of
the public EAGLE-1 and EAGLE-2 checkpoints, and of ViSpec and MSD, which treat image slots
differently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mmspec.models.heads.state_head import (
    CompressedImage,
    ImageSlots,
    SlotMarks,
    SlotRotaryEmbedding,
    StateHead,
    StateHeadConfig,
    add_step_residual,
    step_table,
)
from mmspec.models.llama_layers import Layers
from mmspec.models.loading import load_model


class FeatureHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; `bias` is that of `fc`, `input_norm` a norm before the first attention.

    `visual_slots="compressed"` needs one of two: `num_q` queries of a resampler over an image's
    embeddings, the last of which gives a global vector that is fused into every later state
    (ViSpec), or `num_latents` vectors that attend to its features (SpecFLASH).
    """

    model_type = "feature_head"

    num_hidden_layers: int = 1
    bias: bool = True
    input_norm: bool = False
    num_q: int = 0
    num_latents: int = 0

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if (self.visual_slots == "compressed") != ((self.num_q > 0) != (self.num_latents > 0)):
            raise ValueError(
                f"visual_slots={self.visual_slots!r} with num_q={self.num_q} and num_latents="
                f"{self.num_latents}; 'compressed' needs exactly one of them, others need none"
            )


class FeatureHead(StateHead):
    """Maps next tokens and the states before them to the states of these tokens."""

    config: FeatureHeadConfig
    config_class = FeatureHeadConfig
    _keys_to_ignore_on_load_unexpected = [r"embed_tokens\.weight"]  # noqa: RUF012

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        count = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, layer) for layer in count)
        if not config.input_norm:
            self.layers[0].input_layernorm = nn.Identity()
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.step_residual = step_table(config)
        latents = config.num_latents
        self.latents = nn.Parameter(torch.zeros(latents, width)) if latents else None
        self.imadpt = ImageAdaptor(config, config.num_q) if config.num_q else None
        self.img_fc = nn.Linear(2 * width, width) if config.num_q else None
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if module is self.img_fc:  # initialised as EAGLE: ignores the global vector
            eye = torch.eye(module.out_features)
            module.weight.copy_(torch.cat((eye, torch.zeros_like(eye)), 1))
            module.bias.zero_()
        if isinstance(module, ImageAdaptor):
            module.q.normal_(0.0, module.head_dim**-0.5)
        if module is self and self.latents is not None:
            self.latents.normal_(0.0, self.config.initializer_range)

    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        return self.layers, self.fuse_inputs(embeds, states, marks)

    def fuse_inputs(self, embeds: Tensor, states: Tensor, marks: SlotMarks) -> Tensor:  # (B, q, D)
        """Inputs of the layers."""
        if self.img_fc is not None:
            vector = marks.global_vector
            vector = torch.zeros_like(states) if vector is None else vector.expand_as(states)
            states = self.img_fc(torch.cat((states, vector), -1))
        inputs: Tensor = self.fc(torch.cat((embeds, states), -1))
        inputs = add_step_residual(inputs, self.step_residual, marks.steps)
        if marks.raw is not None:
            inputs = torch.where(marks.raw[..., None], embeds, inputs)
        return inputs

    def compress_image(self, picture: ImageSlots) -> CompressedImage:
        features, count = picture.features, len(picture.embeds)
        slots = torch.arange(count, device=features.device)
        if self.imadpt is not None:  # placed in the last slots of the image
            vectors = self.imadpt(picture.embeds)
            kept = min(len(vectors) - 1, count)
            return CompressedImage(vectors[:-1][:kept], slots[count - kept :], vectors[-1])
        if self.latents is not None:  # softmax(A F') F: no projection, no scaling
            vectors = (self.latents[:count] @ features.T).softmax(-1) @ features
            return CompressedImage(vectors, slots[: len(vectors)])
        return super().compress_image(picture)


class ImageAdaptor(nn.Module):
    """Learned queries attend to image embeddings (n, D): (Q, D) (ViSpec, Kang et al. 2025).

    Independent of the order of embeddings. Parameter names are those of published checkpoints
    (`imadpt`).
    """

    def __init__(self, config: Any, queries: int) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.head_dim = width // heads
        self.q = nn.Parameter(torch.zeros(queries, heads, self.head_dim))
        self.k_proj = nn.Linear(width, width, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, embeds: Tensor) -> Tensor:  # (n, D) -> (Q, D)
        keys, values = (
            part(embeds).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
            for part in (self.k_proj, self.v_proj)
        )
        attended = functional.scaled_dot_product_attention(self.q.transpose(0, 1), keys, values)
        found: Tensor = self.o_proj(attended.transpose(0, 1).flatten(1))
        return found


def load_head(folder: str | Path, dtype: torch.dtype | None = None) -> FeatureHead:
    """Load a head from a folder, in the saved dtype or `dtype`.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: FeatureHead = load_model(FeatureHead, folder, "feature head", dtype)
    return loaded
