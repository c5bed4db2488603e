"""Look-ahead tokens: learned input embeddings after which a target predicts later tokens (PaSS).

Monea et al. 2023, "PaSS: parallel speculative sampling". The target, which stays frozen, reads K
vectors after the newest token as if they were embeddings of tokens; after vector i it predicts the
token i + 1 positions later:

    reads        b    [v1   v2   v3]      b the newest token
    predicts     c     d    e    f        c as the target does anyway

These K vectors are all that is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmspec.errors import check_number
from mmspec.models.heads.token_heads import TokenHeadsConfig

MAX_TOKENS = 64


class LookaheadTokensConfig(TokenHeadsConfig):
    """`hidden_size` is the width of the target's input embeddings, `vocab_size` its vocabulary."""

    model_type = "lookahead_tokens"

    num_tokens: int = 4
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        check_number("num_tokens", self.num_tokens, 1, MAX_TOKENS, whole=True)


class LookaheadTokens(PreTrainedModel):
    """A table (K, D) of input embeddings for a frozen target."""

    config: LookaheadTokensConfig
    config_class = LookaheadTokensConfig
    base_model_prefix = "model"

    def __init__(self, config: LookaheadTokensConfig) -> None:
        super().__init__(config)
        self.embeds = nn.Parameter(torch.zeros(config.num_tokens, config.hidden_size))
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            self.embeds.normal_(0.0, self.config.initializer_range)

    @property
    def reach(self) -> int:
        """How many tokens one forward of the target predicts."""
        return self.config.num_tokens + 1

    def forward(self, rows: int) -> Tensor:  # (rows, K, D)
        """The embeddings, for each row."""
        return self.embeds.expand(rows, -1, -1)

    @torch.no_grad()
    def copy_embedding(self, embedding: Tensor) -> None:  # (D,)
        """Initialise all vectors with one embedding."""
        self.embeds.copy_(embedding)
