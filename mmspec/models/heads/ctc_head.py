"""The CTC head: slots over all tokens and a blank, read as a text of any length.

Wen et al. 2024, "Speculative decoding with CTC-based draft model for LLM inference acceleration". A
decoder layer reads what a feature head reads; from its newest slot a block per draft slot gives the
distribution of a token or of the blank:

    slot t    fc([embedding of token t + 1 ; state of token t]) -> layer -> K blocks
              -> the target's output head, and one more logit for the blank

Paths are collapsed as in speech recognition: `the the _ cat` is "the cat", so K slots hold at most
K tokens, and the slots of a text may shift against each other. Reconstructed: one block per slot;
the shared output head.
"""

from __future__ import annotations

from collections.abc import Callable
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

MAX_SLOTS = 64


class CtcHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; `num_slots` draft slots, trained to hold `num_labels` tokens."""

    model_type = "ctc_head"
    supported_choices: ClassVar[frozenset[str]] = frozenset(
        ("visual_slots", "positions", "visual_keep")
    )
    supported_slots: ClassVar[tuple[str, ...]] = ALL_FUSED

    num_hidden_layers: int = 1
    num_slots: int = 8
    num_labels: int = 5

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_number("num_slots", self.num_slots, 1, MAX_SLOTS, whole=True)
        check_number("num_labels", self.num_labels, 1, self.num_slots, whole=True)


class CtcHead(StateHead):
    """Maps next tokens and the states before them to K draft slots over tokens and a blank."""

    config: CtcHeadConfig
    config_class = CtcHeadConfig

    def __init__(self, config: CtcHeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, layer) for layer in layers)
        self.blocks = nn.ModuleList(MedusaBlock(width) for _ in range(config.num_slots))
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.blank = nn.Linear(width, 1)
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not init_block(module):
            super()._init_weights(module)  # type: ignore[no-untyped-call]

    @property
    def reach(self) -> int:
        """How many draft slots there are."""
        return self.config.num_slots

    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        return self.layers, self.fc(torch.cat((embeds, states), -1))

    def predict_slots(self, hidden: Tensor) -> Tensor:  # (..., D) -> (..., K, D)
        """States of all draft slots, from what `forward` returned for a slot."""
        states: Tensor = self.norm(torch.stack([block(hidden) for block in self.blocks], -2))
        return states

    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of states (..., D) over all tokens, then the blank: (..., V + 1)."""
        return torch.cat((target_head(states), self.blank(states)), -1)

    def expand_logits(self, logits: Tensor) -> Tensor:  # (..., V + 1) -> (..., V)
        """Logits over tokens alone."""
        return logits[..., :-1]
