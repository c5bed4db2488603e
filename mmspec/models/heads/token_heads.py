"""What all sets of heads have in common that say several tokens of one state of a target."""

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
        """The configuration of heads for a decoder with this text configuration.

        `vocabulary` is what the target speaks: codes, for a model that draws or sounds.
        """
        return cls(**{"hidden_size": config.hidden_size, "vocab_size": vocabulary, **changes})


class TokenHeads(PreTrainedModel, ABC):
    """Head h says, of state t, token t + 1 + h; the target itself says token t + 1."""

    config: Any
    base_model_prefix = "model"

    @property
    @abstractmethod
    def reach(self) -> int:
        """How many heads there are."""

    @property
    def feature_size(self) -> int:
        """Width of the states of the target that they read."""
        return int(self.config.hidden_size)

    @abstractmethod
    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """What each head says of states (..., D): (..., H, V)."""
