"""Probability distributions of one token, and how they are made from logits and sampled.

`Distribution` is what every one offers. It has a batch shape, and indexing acts on it.
`sample(keys)` is a deterministic function of the keys, so the same keys couple two distributions:
the target and the drafter sample from the same noise.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.distributions.noise import Keys


class Distribution(Protocol):
    """A distribution of one token per batch entry."""

    @property
    def batch(self) -> torch.Size: ...
    def log_prob(self, x: Tensor) -> Tensor: ...  # (..., *E) -> (...)
    def sample(self, keys: Keys) -> Tensor: ...  # keys (...) -> (..., *E)
    def residual(self, other: Any) -> Any: ...  # the distribution proportional to (self - other)+
    def invalid_mask(
        self, mask: Tensor | None = None
    ) -> Tensor: ...  # (B, M) -> (B,) bool: unusable
    @property
    def invalid_reason(self) -> str: ...  # what is wrong with a broken distribution
    def __getitem__(self, index: Any) -> Any: ...
