"""Keep the tokens that hold most of the attention, and a uniform sample of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import TokenSelection, top_indices


@dataclass(frozen=True)
class TopPUniform(TokenSelection):
    """The share `keep`: first by attention up to `mass` of it, then evenly over the rest.

    SpecVLM for video (Ji et al. 2025): drop 90 %, mass 0.4. The score is the mean attention of the
    question over all layers and heads; the first stage takes the fewest tokens that hold `mass` of
    all attention on the image. mass=1 is plain top-k, mass=0 an even sample (the release keeps
    one token by attention there); keep=1 is the identity.
    """

    keep: float = 0.1
    mass: float = 0.4
    needs: ClassVar[frozenset[str]] = frozenset({"question-attention"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mass <= 1:
            raise ValueError(
                f"mass={self.mass} is not a share of the attention; give one in [0, 1]"
            )

    def select(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        scores = signals["question-attention"].double()
        head = top_indices(scores, self._count_for_mass(scores, count))
        is_left = torch.ones_like(scores, dtype=torch.bool)
        is_left[head] = False
        rest = is_left.nonzero()[:, 0]
        kept = torch.cat((head, rest[even_indices(len(rest), count - len(head)).to(rest.device)]))
        return kept.sort().values

    def _count_for_mass(self, scores: Tensor, limit: int) -> int:
        """The fewest tokens that hold the mass, at most `limit`."""
        total = scores.sort(descending=True).values.cumsum(0)
        return min(int((total < self.mass * total[-1]).sum()) + (self.mass > 0), limit)


def even_indices(length: int, count: int) -> Tensor:  # (count,)
    """floor(linspace(0, length - 1, count)) in integers; the first index for count=1."""
    return torch.arange(count) * (length - 1) // max(count - 1, 1)
