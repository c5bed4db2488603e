"""Initialization of decoder layers: mimetic initialization and block expansion.

Mimetic initialization (Trockman and Kolter 2023) gives attention matrices the products that trained
attention has; small models then learn to attend in fewer steps. Block expansion (Wu et al. 2024,
LLaMA Pro) deepens a trained shallow model: deep narrow models take longer to train from noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_QUERY_SCALE, _VALUE_SCALE = 0.8, 0.5  # of orthogonal matrices


@torch.no_grad()
def mimetic_init(layers: Iterable[Any]) -> None:
    """Set keys equal to queries, and output projections to transposed values, in Llama layers.

    Raises ValueError for layers with grouped-query attention.
    """
    for layer in layers:
        attention = layer.self_attn
        query, key, value, out = (
            getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        if query.shape != key.shape:
            raise ValueError(
                f"queries have {len(query)} rows and keys {len(key)}; only layers with as many "
                "key heads as query heads are supported"
            )
        key.copy_(query.copy_(_orthogonal(query) * _QUERY_SCALE))
        out.copy_(value.copy_(_orthogonal(value) * _VALUE_SCALE).T)


def _orthogonal(weight: Tensor) -> Tensor:
    return nn.init.orthogonal_(torch.empty_like(weight))


@torch.no_grad()
def expand_blocks(shallow: Any, deep: Any) -> None:
    """Fill the decoder layers of `deep` from those of `shallow`, both lists of Llama layers.

    Each layer is followed by copies of it with zero output, so the function is the same. Raises
    ValueError if one number of layers is not a multiple of the other.
    """
    if len(deep) % len(shallow):
        raise ValueError(
            f"{len(deep)} layers cannot be expanded from {len(shallow)}; choose a multiple of "
            f"{len(shallow)}"
        )
    copies = len(deep) // len(shallow)
    for number, layer in enumerate(deep):
        layer.load_state_dict(shallow[number // copies].state_dict())
        if number % copies:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
