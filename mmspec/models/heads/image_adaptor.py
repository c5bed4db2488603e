"""An image adaptor: learned queries look at the embeddings of a picture (ViSpec).

Kang et al. 2025. No query knows where an embedding stands, so their order does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class ImageAdaptor(nn.Module):
    """Embeddings (n, D) of a picture to as many vectors (Q, D) as there are queries.

    Parameter names are those of the published ViSpec checkpoints (`imadpt`).
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
        seen = functional.scaled_dot_product_attention(self.q.transpose(0, 1), keys, values)
        found: Tensor = self.o_proj(seen.transpose(0, 1).flatten(1))
        return found
