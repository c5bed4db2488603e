"""SpecFLASH's head: one attention layer whose MLP predicts the states of a block of tokens.

Wang et al. 2025. It reads what a feature head reads, and predicts K states from each slot at once:

    slot t    fc([embedding of token t + 1 ; state of token t]) -> attention -> MLP
              -> states of tokens t + 1 .. t + K

The target's output head follows. States of a block do not depend on each other's tokens; the next
block reads the tokens drafted in this one, with the states predicted for them. An image is replaced
by `num_latents` vectors A: C = softmax(A F') F of the target's states F of it, without projection
or scaling. Reconstructed: the attention is Llama's with a norm before it and before the MLP, where
the release adds up the attention to each group of keys.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mmspec.errors import check_number
from mmspec.models.heads.kangaroo import AttentionLayer
from mmspec.models.heads.state_head import (
    CHOICES,
    CompressedImage,
    ImageSlots,
    SlotMarks,
    SlotRotaryEmbedding,
    StateHead,
    StateHeadConfig,
)
from mmspec.models.llama_layers import Layers

MAX_BLOCK = 64


class SemiAutoregressiveHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; `block` states are predicted at once.

    `intermediate_size` is the width of the MLP, in the paper four times that of a state.
    """

    model_type = "semi_autoregressive_head"
    supported_choices: ClassVar[frozenset[str]] = CHOICES - {"sliding_window", "num_steps"}

    num_hidden_layers: int = 1
    visual_slots: str = "compressed"
    num_latents: int = 64
    block: int = 5
    bias: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_number("block", self.block, 1, MAX_BLOCK, whole=True)
        if (self.visual_slots == "compressed") != (self.num_latents > 0):
            raise ValueError(
                f"visual_slots={self.visual_slots!r} with num_latents={self.num_latents}; "
                "'compressed' needs at least one, others num_latents=0"
            )

    @classmethod
    def of(cls, config: Any, vocabulary: int, **changes: Any) -> Any:
        """Make the configuration of a head for a decoder with this text configuration."""
        return super().of(
            config, vocabulary, **{"intermediate_size": 4 * config.hidden_size, **changes}
        )


class SemiAutoregressiveHead(StateHead):
    """Maps next tokens and the states before them to one hidden state, and that to K states."""

    config: SemiAutoregressiveHeadConfig
    config_class = SemiAutoregressiveHeadConfig

    def __init__(self, config: SemiAutoregressiveHeadConfig) -> None:
        super().__init__(config)
        width, latents = config.hidden_size, config.num_latents
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.layers = nn.ModuleList([AttentionLayer(config)])
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.up = nn.Linear(width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.block * width)
        self.latents = nn.Parameter(torch.zeros(latents, width)) if latents else None
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if module is self and self.latents is not None:
            self.latents.normal_(0.0, self.config.initializer_range)

    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        inputs = self.fc(torch.cat((embeds, states), -1))
        if marks.raw is not None:
            inputs = torch.where(marks.raw[..., None], embeds, inputs)
        return self.layers, inputs

    def predict_block(self, hidden: Tensor) -> Tensor:  # (..., D) -> (..., K, D)
        """States of the next K tokens, from what `forward` returned for a slot."""
        made = self.down(functional.silu(self.up(self.norm(hidden))))
        block: Tensor = made.unflatten(-1, (self.config.block, -1))
        return block

    def compress_image(self, picture: ImageSlots) -> CompressedImage:
        if self.latents is None:
            return super().compress_image(picture)
        features, count = picture.features, len(picture.embeds)
        vectors = (self.latents[:count] @ features.T).softmax(-1) @ features
        return CompressedImage(vectors, torch.arange(len(vectors), device=vectors.device))
