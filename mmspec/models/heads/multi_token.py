"""Multi-token heads: independent heads that predict further tokens from one hidden state.

A state is the input of the target's output head, after the final norm, which predicts token t + 1
from state t. Head h predicts token t + 1 + h:

    state t -> residual blocks of head h -> state -> the target's output head -> token t + 1 + h

A block is x + SiLU(W x + b) (Cai et al. 2024, Medusa); W and b are initialised to zero, so an
untrained head repeats the target's prediction of the next token. Heads are independent of each
other and of the tokens in between. The output head is the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.models.heads.token_heads import TokenHeads, TokenHeadsConfig
from mmspec.models.loading import load_model


class MultiTokenHeadsConfig(TokenHeadsConfig):
    """As `TokenHeadsConfig`.

    `num_bigrams` is the size of a table of bigram counts of the training text, for recipes that
    search a path through the heads' predictions.
    """

    model_type = "multi_token_heads"

    num_heads: int = 4
    num_layers: int = 1  # residual blocks of a head
    num_bigrams: int = 0


class MultiTokenHeads(TokenHeads):
    """Maps one hidden state of the target to one state per head."""

    config: MultiTokenHeadsConfig
    config_class = MultiTokenHeadsConfig
    bigrams: Tensor  # (P, 3) int32: token, next token, count

    def __init__(self, config: MultiTokenHeadsConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(config.num_layers))
            for _ in range(config.num_heads)
        )
        table = torch.zeros(config.num_bigrams, 3, dtype=torch.int32)
        self.register_buffer("bigrams", table)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)

    @property
    def reach(self) -> int:
        return self.config.num_heads

    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        return target_head(self(states))

    def forward(self, states: Tensor) -> Tensor:  # (..., D) -> (..., H, D)
        """Inputs of the target's output head, one per head."""
        found = []
        for head in self.heads:
            assert isinstance(head, nn.ModuleList)
            out = states
            for block in head:
                out = out + functional.silu(block(out))
            found.append(out)
        return torch.stack(found, -2)


def load_multi_token_heads(folder: str | Path, dtype: torch.dtype | None = None) -> MultiTokenHeads:
    """Load heads from a folder, in the saved dtype or `dtype`.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: MultiTokenHeads = load_model(MultiTokenHeads, folder, "set of multi-token heads", dtype)
    return loaded
