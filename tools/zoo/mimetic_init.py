"""Attention that begins with likeness: it finds what is like the asker, and copies it.

Small models learn to look things up in a part of the steps when they begin so (mimetic
initialisation, Trockman and Kolter 2023): trained attention has such products of matrices, and it
takes long to reach them from noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_ASKING, _COPYING = 0.8, 0.5  # of the scale of orthogonal matrices


@torch.no_grad()
def begin_with_likeness(layers: Iterable[Any]) -> None:
    """Give decoder layers of Llama's kind keys like their queries, and outputs that undo values.

    Raises ValueError for layers whose keys and values are shared between heads.
    """
    for layer in layers:
        attention = layer.self_attn
        query, key, value, out = (
            getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        if query.shape != key.shape:
            raise ValueError(
                f"queries have {len(query)} rows and keys {len(key)}; only layers with as many "
                "heads for keys as for queries begin with likeness"
            )
        key.copy_(query.copy_(_orthogonal(query) * _ASKING))
        out.copy_(value.copy_(_orthogonal(value) * _COPYING).T)


def _orthogonal(weight: Tensor) -> Tensor:
    return nn.init.orthogonal_(torch.empty_like(weight))
