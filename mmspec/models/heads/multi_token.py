"""Multi-token heads: each says, of one hidden state of a target, a token further ahead.

A state is what the target's output head sees, behind the final norm; that head says token t + 1 of
state t. Head h here says token t + 1 + h:

    state t -> residual blocks of head h -> state -> the target's output head -> token t + 1 + h

A block is x + SiLU(W x + b) (Cai et al. 2024, Medusa); W and b begin at zero, so an untrained head
says what the target says of the next token. Heads see no token between, and nothing of each other.
The output head is the target's and is not kept here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.models.heads.token_heads import TokenHeads, TokenHeadsConfig
from mmspec.models.reading import read


class MultiTokenHeadsConfig(TokenHeadsConfig):
    """As `TokenHeadsConfig`.

    `num_bigrams` are counts of neighbours in the training text, kept beside the heads for recipes
    that choose a path through what these say.
    """

    model_type = "multi_token_heads"

    num_heads: int = 4
    num_layers: int = 1  # residual blocks of a head
    num_bigrams: int = 0


class MultiTokenHeads(TokenHeads):
    """One state of the target to as many as there are heads."""

    config: MultiTokenHeadsConfig
    config_class = MultiTokenHeadsConfig
    bigrams: Tensor  # (P, 3) int32: a token, the next one, how often

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
        """What the target's output head is to read, for each head."""
        found = []
        for head in self.heads:
            assert isinstance(head, nn.ModuleList)
            said = states
            for block in head:
                said = said + functional.silu(block(said))
            found.append(said)
        return torch.stack(found, -2)


def load_multi_token_heads(folder: str | Path, dtype: torch.dtype | None = None) -> MultiTokenHeads:
    """Read heads from a folder, as they were saved or in `dtype`.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: MultiTokenHeads = read(MultiTokenHeads, folder, "set of multi-token heads", dtype)
    return loaded
