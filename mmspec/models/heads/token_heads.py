"""Base classes of heads that predict several tokens from one hidden state of a target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel


class TokenHeadsConfig(PreTrainedConfig):
    """`hidden_size` and `vocab_size` are the target's."""

    hidden_size: int = 4096
    vocab_size: int = 32000

    @classmethod
    def of(cls, config: Any, vocabulary: int, **changes: Any) -> Any:
        """Make the configuration of heads for a decoder with this text configuration.

        `vocabulary` is the target's output vocabulary: codes, for image and speech models.
        """
        return cls(**{"hidden_size": config.hidden_size, "vocab_size": vocabulary, **changes})


class TokenHeads(PreTrainedModel, ABC):
    """Head h predicts token t + 1 + h from state t; the target predicts token t + 1."""

    config: Any
    base_model_prefix = "model"

    @property
    @abstractmethod
    def reach(self) -> int:
        """Number of heads."""

    @property
    def feature_size(self) -> int:
        """Width of the target's hidden states."""
        return int(self.config.hidden_size)

    @abstractmethod
    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of all heads for states (..., D): (..., H, V)."""
