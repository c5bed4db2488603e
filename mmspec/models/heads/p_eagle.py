"""The P-EAGLE head: an EAGLE-3 head that drafts several tokens in one run.

Hui et al. 2026, "P-EAGLE: parallel-drafting EAGLE with scalable training". After the slots of an
EAGLE-3 head come slots of unknown tokens. They read the embedding of a mask token, and a learned
vector in place of the target's features, which `fc` fuses like these:

    slot         b|a    c|b   [?|m    ?|m ]     token | features of the token before
    predicts      .      d      e      f        d is drafted by the last true slot

Attention is causal, so every slot of a draft reads the true slots and the unknown ones before it,
but no drafted token. Parameter names are those of the public checkpoints.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from mmspec.models.heads.eagle3 import Eagle3HeadConfig, FusedStateHead
from mmspec.models.heads.state_head import CHOICES


class PEagleHeadConfig(Eagle3HeadConfig):
    """As `Eagle3HeadConfig`. One run drafts `num_depths` tokens.

    `mask_token_id` is the target's token that unknown slots embed, best one that is never
    generated. `own_embeddings` gives the head a trained embedding table, as public checkpoints
    have; it then reads images as placeholders.
    """

    model_type = "p_eagle_head"
    supported_choices: ClassVar[frozenset[str]] = CHOICES - {"num_steps"}

    num_depths: int = 8
    mask_token_id: int = 0
    own_embeddings: bool = False

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        check_mask_token(self.mask_token_id, self.vocab_size)
        if self.num_depths < 1:
            raise ValueError(f"num_depths={self.num_depths} must be at least 1")
        if self.own_embeddings and self.visual_slots == "fused":
            raise ValueError(
                "own_embeddings=True has no embeddings of image contents, so visual_slots='fused' "
                "cannot be read; give visual_slots='placeholder' or 'hidden'"
            )

    @property
    def has_embeddings(self) -> bool:
        return self.own_embeddings or super().has_embeddings


class PEagleHead(FusedStateHead):
    """A head that drafts `num_depths` tokens per run, independently of each other."""

    config: PEagleHeadConfig
    config_class = PEagleHeadConfig

    def __init__(self, config: PEagleHeadConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.num_taps * self.feature_size))

    def mask_states(self, count: int) -> Tensor:  # (1, count, D)
        """States of unknown slots."""
        return self.fuse(self.mask_hidden).expand(1, count, -1)

    @torch.no_grad()
    def copy_embeddings(self, table: Tensor) -> None:  # (V, D)
        """Initialise an embedding table of its own with the target's, if these have one width."""
        if self.embed_tokens is not None and table.shape == self.embed_tokens.weight.shape:
            self.embed_tokens.weight.copy_(table)


def check_mask_token(token: int, vocabulary: int) -> None:
    """Refuse a mask token outside of the vocabulary. Raises ValueError."""
    if not 0 <= token < vocabulary:
        raise ValueError(
            f"mask_token_id={token} is not a token of the target, which has {vocabulary}; give an "
            "id below that which is never generated"
        )


def unused_token(counts: Tensor) -> int:  # (V,)
    """The least frequent token, a mask token for a new head; ties go to the largest id."""
    reversed_at = int(counts.flip(0).argmin())
    return len(counts) - 1 - reversed_at
