"""A deeper model that says what a shallower one says: block expansion (Wu et al. 2024, LLaMA Pro).

A deep narrow model learns the longer the deeper it is, and costs as much in every step; grown from
a shallow one that has learnt, it needs few steps more.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def expand(shallow: Any, deep: Any) -> None:
    """Fill the decoder layers of `deep` from those of `shallow`, both lists of Llama's kind.

    Behind each layer stand copies of it that add nothing yet. Raises ValueError where one count is
    no multiple of the other.
    """
    if len(deep) % len(shallow):
        raise ValueError(
            f"{len(deep)} layers cannot be grown from {len(shallow)}: each gets as many copies as "
            "the others; choose a multiple"
        )
    copies = len(deep) // len(shallow)
    for number, layer in enumerate(deep):
        layer.load_state_dict(shallow[number // copies].state_dict())
        if number % copies:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
