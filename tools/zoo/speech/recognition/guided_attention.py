"""Attention that is shown where in the sound the next letter is.

Guided attention (Tachibana et al. 2018) pulls the attention of speech synthesis to a diagonal; here
the alignment of the CTC head says the very place. One head of some layers is guided, the rest are
left to find out for themselves. A language model of letters learns to listen in some hundred steps
so; without, it first learns what is mostly said, and hardly gets beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LAYERS, HEAD = (1, 2), 0
_LEAST = 1e-4  # attention below is as little as none


@dataclass(frozen=True)
class LetterPlaces:
    """Of each letter of a batch (n,): its row, from where it is written, and where it is heard."""

    rows: Tensor
    written: Tensor
    heard: Tensor


def unheard(attentions: Sequence[Tensor], places: LetterPlaces) -> Tensor:
    """Mean -log of the attention to each letter's place; attentions: (B, heads, L, L) by layer.

    Raises ValueError where the layers that are guided gave none, as under fused attention.
    """
    if len(attentions) <= max(LAYERS):
        raise ValueError(
            f"{len(attentions)} layers gave their attention, and layers {LAYERS} are guided; read "
            "the model with attn_implementation='eager' and output_attentions=True"
        )
    found = [attentions[layer][places.rows, HEAD, places.written, places.heard] for layer in LAYERS]
    return -(torch.stack(found) + _LEAST).log().mean()
