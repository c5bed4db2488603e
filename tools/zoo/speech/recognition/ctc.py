"""Letters by CTC, which gives an encoder its bearings: labels are code points, 0 is the blank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.codes.ctc import collapse

LABELS = 128  # ASCII


def ctc_loss(logits: Tensor, texts: Sequence[str], frames: Tensor) -> Tensor:
    """Mean loss per letter. logits: (B, T, LABELS); frames: (B,), how many of T are sound."""
    labels = torch.tensor([ord(letter) for text in texts for letter in text])
    lengths = torch.tensor([len(text) for text in texts])
    distribution = logits.float().log_softmax(-1).transpose(0, 1)
    return functional.ctc_loss(distribution, labels, frames, lengths, zero_infinity=True)


def letters(logits: Tensor, frames: Tensor) -> list[str]:
    """What is heard greedily: repeats are one, blanks none. logits: (B, T, LABELS); frames: (B,)"""
    paths = zip(logits.argmax(-1).tolist(), frames.tolist(), strict=True)
    return ["".join(map(chr, collapse(path[:length]))) for path, length in paths]
