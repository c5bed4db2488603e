"""Losses of recognisers: CTC over letters, guided attention, and corruption of decoder inputs.

CTC labels are code points, 0 is the blank. Guided attention (Tachibana et al. 2018) pulls attention
to a diagonal; here the CTC alignment gives the target position. One head of some layers is guided.
With guidance a letter-level language model learns to attend to the audio within some hundred steps;
without, it first learns the frequent texts and hardly improves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.codes.ctc import collapse

LABELS = 128  # ASCII
LAYERS, HEAD = (1, 2), 0  # guided
_MIN_ATTENTION = 1e-4
CORRUPTION_RATE = 0.12


def ctc_loss(logits: Tensor, texts: Sequence[str], frames: Tensor) -> Tensor:
    """Mean loss per letter. logits: (B, T, LABELS); frames: (B,), the valid ones of T."""
    labels = torch.tensor([ord(letter) for text in texts for letter in text])
    lengths = torch.tensor([len(text) for text in texts])
    distribution = logits.float().log_softmax(-1).transpose(0, 1)
    return functional.ctc_loss(distribution, labels, frames, lengths, zero_infinity=True)


def decode_letters(logits: Tensor, frames: Tensor) -> list[str]:
    """Greedy CTC decoding. logits: (B, T, LABELS); frames: (B,)"""
    paths = zip(logits.argmax(-1).tolist(), frames.tolist(), strict=True)
    return ["".join(map(chr, collapse(path[:length]))) for path, length in paths]


@dataclass(frozen=True)
class LetterPositions:
    """Per letter of a batch (n,): row, query position of its prediction, key position in audio."""

    rows: Tensor
    queries: Tensor
    keys: Tensor


def guided_attention_loss(attentions: Sequence[Tensor], places: LetterPositions) -> Tensor:
    """Mean -log of the attention to each letter's position; attentions: (B, heads, L, L) per layer.

    Raises ValueError if guided layers return no attention, as with fused attention.
    """
    if len(attentions) <= max(LAYERS):
        raise ValueError(
            f"{len(attentions)} layers returned attention, and layers {LAYERS} are guided; run "
            "the model with attn_implementation='eager' and output_attentions=True"
        )
    found = [attentions[layer][places.rows, HEAD, places.queries, places.keys] for layer in LAYERS]
    return -(torch.stack(found) + _MIN_ATTENTION).log().mean()


def corrupt_letters(ids: Tensor, is_text: Tensor, generator: torch.Generator) -> Tensor:
    """Replace some ids (B, L) of the text (mask (B, L)) by random others of it.

    A decoder that cannot rely on its inputs attends to the audio.
    """
    letters = ids[is_text]
    others = letters[torch.randint(len(letters), ids.shape, generator=generator)]
    wrong = torch.rand(ids.shape, generator=generator) < CORRUPTION_RATE
    return torch.where(wrong & is_text, others, ids)
