"""Letters exchanged at random: a decoder that cannot trust what it wrote has to listen."""

from __future__ import annotations

import torch
from torch import Tensor

RATE = 0.12


def misread(ids: Tensor, said: Tensor, generator: torch.Generator) -> Tensor:
    """ids (B, L) with some of those that are `said` (B, L) exchanged for others of them."""
    letters = ids[said]
    others = letters[torch.randint(len(letters), ids.shape, generator=generator)]
    wrong = torch.rand(ids.shape, generator=generator) < RATE
    return torch.where(wrong & said, others, ids)
