"""The OWL head: an LSTM that starts from the target's last state and reads drafted tokens.

Lee et al. 2025, "OWL: overcoming window length-dependence in speculative decoding for long-context
inputs". It reads one state of the target, that of the token before the newest one, and attends to
nothing, so a draft costs the same after any context:

    (h, c) = tanh(W s + b) of state s of token t
    step i    embedding of token t + 1 + i -> LSTM -> norm(W h) -> the target's output head

Step i predicts token t + 2 + i. Embedding table and output head are the target's. Reconstructed:
the projections; s is not added to W h, as s alone predicts token t + 1. Left out: the [SPEC] token
whose state the paper's verifier computes for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mmspec.errors import check_number
from mmspec.models.heads.token_heads import TokenHeadsConfig

MAX_LAYERS, MAX_WIDTH = 8, 2**16


class OwlHeadConfig(TokenHeadsConfig):
    """`hidden_size` and `vocab_size` are the target's, `lstm_size` is the width of the LSTM.

    None = the target's.
    """

    model_type = "owl_head"

    lstm_size: int | None = None
    num_layers: int = 1
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        self.lstm_size = self.hidden_size if self.lstm_size is None else self.lstm_size
        check_number("lstm_size", self.lstm_size, 1, MAX_WIDTH, whole=True)
        check_number("num_layers", self.num_layers, 1, MAX_LAYERS, whole=True)


class OwlHead(PreTrainedModel):
    """Maps a state of the target and the tokens after it to states of the next tokens."""

    config: OwlHeadConfig
    config_class = OwlHeadConfig
    base_model_prefix = "model"

    def __init__(self, config: OwlHeadConfig) -> None:
        super().__init__(config)
        width, size = config.hidden_size, config.lstm_size or config.hidden_size
        self.start = nn.Linear(width, 2 * config.num_layers * size)
        self.lstm = nn.LSTM(width, size, config.num_layers, batch_first=True)
        self.out = nn.Linear(size, width)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, nn.LSTM):
            module.reset_parameters()

    @property
    def feature_size(self) -> int:
        """Width of the target's hidden states."""
        return int(self.config.hidden_size)

    def begin(self, states: Tensor) -> tuple[Tensor, Tensor]:  # (n, D) -> (layers, n, S) each
        """The LSTM's hidden and cell states after the target's states."""
        both = self.start(states).tanh().unflatten(-1, (2, self.config.num_layers, -1))
        hidden, cell = both.movedim(0, -2).unbind(0)
        return hidden.contiguous(), cell.contiguous()

    def forward(
        self, embeds: Tensor, memory: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """States (n, q, D) after tokens of these embeddings (n, q, D), and the LSTM's own.

        `memory` is the LSTM's (layers, n, S) before the tokens.
        """
        out, memory = self.lstm(embeds, memory)
        return self.norm(self.out(out)), memory
