"""Medusa heads: independent heads with residual blocks and an output matrix each.

Cai et al. 2024. Head i predicts token t + 2 + i from the target's last hidden state t:

    state t -> x + SiLU(W x + b), several times -> output matrix of head i -> token t + 2 + i

W is initialised to zero and the output matrix to the target's, so an untrained head repeats the
target's prediction of the next token. Parameter names are those of the published checkpoints,
"0.0.linear.weight" for the first block of the first head, "0.1.weight" for its output matrix.
Blocks have separate weights; in published heads with several layers these are equal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.models.heads.token_heads import TokenHeads, TokenHeadsConfig


class MedusaHeadsConfig(TokenHeadsConfig):
    """As `TokenHeadsConfig`; names are the published ones."""

    model_type = "medusa"

    medusa_num_heads: int = 5
    medusa_num_layers: int = 1


class ZeroLinear(nn.Linear):
    """A linear layer initialised to zero."""


class FirstLinear(nn.Linear):
    """A linear layer initialised to select the first of the concatenated input vectors."""


@torch.no_grad()
def init_block(module: nn.Module) -> bool:
    """Initialise a linear layer of a block; return whether it is one."""
    if isinstance(module, FirstLinear):
        module.weight.copy_(torch.eye(*module.weight.shape))
    elif isinstance(module, ZeroLinear):
        module.weight.zero_()
    else:
        return False
    module.bias.zero_()
    return True


class MedusaBlock(nn.Module):
    """R x + SiLU(W x + b); R is the identity, or a linear layer for several `inputs` vectors."""

    def __init__(self, width: int, inputs: int = 1) -> None:
        super().__init__()
        self.linear = ZeroLinear(inputs * width, width)
        self.res_connection = FirstLinear(inputs * width, width) if inputs > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # (..., inputs * D) -> (..., D)
        out: Tensor = self.res_connection(x) + functional.silu(self.linear(x))
        return out


class MedusaHeads(TokenHeads):
    """Maps one hidden state of the target to logits of several tokens, one head each."""

    config: MedusaHeadsConfig
    config_class = MedusaHeadsConfig

    def __init__(self, config: MedusaHeadsConfig) -> None:
        super().__init__(config)
        width, size = config.hidden_size, config.vocab_size
        for head in range(config.medusa_num_heads):
            blocks = [MedusaBlock(width) for _ in range(config.medusa_num_layers)]
            self.add_module(str(head), nn.Sequential(*blocks, nn.Linear(width, size, bias=False)))
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not init_block(module) and isinstance(module, nn.Linear):
            module.weight.normal_(0.0, self.config.hidden_size**-0.5)

    @property
    def reach(self) -> int:
        return self.config.medusa_num_heads

    def forward(self, states: Tensor) -> Tensor:  # (..., D) -> (..., H, V)
        """Logits of every head."""
        return torch.stack(
            [self.get_submodule(str(head))(states) for head in range(self.reach)], -2
        )

    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        logits: Tensor = self(states)
        return logits

    @torch.no_grad()
    def copy_output(self, weight: Tensor) -> None:  # (V, D)
        """Initialise the output matrix of every head with the target's."""
        for head in range(self.reach):
            output = list(self.get_submodule(str(head)).children())[-1]
            assert isinstance(output, nn.Linear)
            output.weight.copy_(weight)
