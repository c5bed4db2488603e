"""The Amphista head: drafting heads that attend to each other after staged adaptation layers.

Li et al. 2024, "Amphista: bi-directional multi-head decoding for accelerating LLM inference". Two
decoder layers adapt the target's state to drafting; both read the embedding of the newest token:

    slot t    fc1([embedding of token t + 1 ; state of token t]) -> layer 1 -> a1
              fc2([embedding of token t + 1 ; a1              ]) -> layer 2 -> a2

The first half of the K heads maps a1 to their inputs by residual blocks, the second half a2. These
K vectors, each with a learned position vector, attend to each other in both directions (the
auto-embedding block), and head i predicts token t + 2 + i. All K heads run at once, and none is
conditioned on a drafted token. The output head is the target's. Reconstructed: the shared output
head, where the paper trains one per head; sizes of the auto-embedding block, one norm after it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from mmspec.errors import check_number
from mmspec.models.heads.medusa import MedusaBlock, init_block
from mmspec.models.heads.state_head import (
    ALL_FUSED,
    SlotMarks,
    SlotRotaryEmbedding,
    StateHead,
    StateHeadConfig,
)
from mmspec.models.llama_layers import Layers

MAX_HEADS = 64


class AmphistaHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; `num_heads` tokens are predicted at once.

    `num_hidden_layers` is the number of adaptation stages, of which each serves as many heads.
    """

    model_type = "amphista_head"
    supported_choices: ClassVar[frozenset[str]] = frozenset(
        ("visual_slots", "positions", "visual_keep")
    )
    supported_slots: ClassVar[tuple[str, ...]] = ALL_FUSED

    num_hidden_layers: int = 2
    num_heads: int = 4

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_number("num_heads", self.num_heads, 1, MAX_HEADS, whole=True)
        check_number("num_hidden_layers", self.num_hidden_layers, 1, self.num_heads, whole=True)


class AdaptationStage(nn.Module):
    """A decoder layer on embeddings and the output of the stage before."""

    def __init__(self, config: AmphistaHeadConfig, layer: int) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layer = LlamaDecoderLayer(config, layer)

    def forward(self, outputs: Tensor, embeds: Tensor, **read: Any) -> Tensor:
        """Append the output of this stage to those before (B, q, n * D): (B, q, (n + 1) * D)."""
        last = outputs[..., -embeds.shape[-1] :]
        states = self.layer(self.fc(torch.cat((embeds, last), -1)), **read)
        return torch.cat((outputs, states), -1)


class AmphistaHead(StateHead):
    """Maps next tokens and the states before them to adapted states, and these to K states."""

    config: AmphistaHeadConfig
    config_class = AmphistaHeadConfig

    def __init__(self, config: AmphistaHeadConfig) -> None:
        super().__init__(config)
        width, count = config.hidden_size, config.num_heads
        stages = range(config.num_hidden_layers)
        self.stages = nn.ModuleList(AdaptationStage(config, layer) for layer in stages)
        self.blocks = nn.ModuleList(MedusaBlock(width) for _ in range(count))
        self.places = nn.Parameter(torch.zeros(count, width))
        self.auto_embedding = nn.TransformerEncoderLayer(
            width,
            config.num_attention_heads,
            config.intermediate_size,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not init_block(module):
            super()._init_weights(module)  # type: ignore[no-untyped-call]
        if module is self:
            self.places.normal_(0.0, self.config.initializer_range)

    @property
    def reach(self) -> int:
        """How many tokens it predicts at once."""
        return self.config.num_heads

    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        return [partial(stage, embeds=embeds) for stage in self.stages], states

    def finish_states(self, states: Tensor) -> Tensor:
        """Outputs (B, q, stages * D) of all stages, without the target's states."""
        return states[..., self.config.hidden_size :]

    def predict_block(self, adapted: Tensor) -> Tensor:  # (..., stages * D) -> (..., K, D)
        """States of the next K tokens, from what `forward` returned for a slot."""
        outputs = adapted.unflatten(-1, (self.config.num_hidden_layers, -1))
        per_stage = -(-self.reach // self.config.num_hidden_layers)
        heads = [block(outputs[..., at // per_stage, :]) for at, block in enumerate(self.blocks)]
        inputs = (torch.stack(heads, -2) + self.places).reshape(-1, *self.places.shape)
        found: Tensor = self.norm(self.auto_embedding(inputs))
        return found.view(*adapted.shape[:-1], self.reach, -1)
