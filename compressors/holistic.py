"""Keep the tokens that are relevant, new since the previous frame, or in a complex region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import TokenSelection, top_indices


@dataclass(frozen=True)
class Holistic(TokenSelection):
    """The share `keep` by three scores, each scaled to [0, 1] within its frame (HIPPO, Lv 2026).

    Relevance: mean attention of the question, over layers and heads. Novelty: 1 - cosine with the
    same cell of the previous frame (for the first frame: of the next). Complexity: variance of the
    cosines with the `window` x `window` cells around, itself included. Reconstructed: boundary,
    window, and equal weights. An image has no novelty. keep=1 is the identity.
    """

    keep: float = 0.1
    relevance: float = 1.0
    novelty: float = 1.0
    complexity: float = 1.0
    window: int = 3
    needs: ClassVar[frozenset[str]] = frozenset({"question-attention"})

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = (self.relevance, self.novelty, self.complexity)
        if min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(
                f"relevance, novelty, complexity = {weights} are not weights; give numbers from 0 "
                "up, not all 0"
            )
        if self.window < 1 or self.window % 2 == 0:
            raise ValueError(f"window={self.window} has no middle; give an odd number")

    def select(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        direction = functional.normalize(features.values.float(), dim=-1)
        direction = direction.unflatten(0, features.shape)  # (F, h, w, H)
        attention = signals["question-attention"].float().view(features.shape)
        scores = (
            self.relevance * _within_frame(attention)
            + self.novelty * _within_frame(_novelty(direction))
            + self.complexity * _within_frame(_complexity(direction, self.window))
        )
        return top_indices(scores.flatten(), count)


def _within_frame(scores: Tensor) -> Tensor:  # (F, h, w)
    """Scale each frame to [0, 1]; 0 where a frame is constant."""
    low, high = scores.amin((1, 2), keepdim=True), scores.amax((1, 2), keepdim=True)
    return torch.where(high > low, (scores - low) / (high - low).clamp_min(1e-30), 0.0)


def _novelty(direction: Tensor) -> Tensor:  # (F, h, w, H) -> (F, h, w)
    if len(direction) == 1:
        return direction.new_zeros(direction.shape[:3])
    change = 1 - (direction[1:] * direction[:-1]).sum(-1)
    return torch.cat((change[:1], change))


def _complexity(direction: Tensor, window: int) -> Tensor:  # (F, h, w, H) -> (F, h, w)
    """Variance over the part of the window inside the frame."""
    height, width = direction.shape[1:3]
    margin = window // 2
    total, squares, counts = (direction.new_zeros(direction.shape[:3]) for _ in range(3))
    for down in range(-min(margin, height - 1), min(margin, height - 1) + 1):
        for right in range(-min(margin, width - 1), min(margin, width - 1) + 1):
            rows = slice(max(-down, 0), height - max(down, 0))
            columns = slice(max(-right, 0), width - max(right, 0))
            other = direction[:, rows.start + down : rows.stop + down]
            other = other[:, :, columns.start + right : columns.stop + right]
            cosine = (direction[:, rows, columns] * other).sum(-1)
            total[:, rows, columns] += cosine
            squares[:, rows, columns] += cosine**2
            counts[:, rows, columns] += 1
    return (squares / counts - (total / counts) ** 2).clamp_min(0)
