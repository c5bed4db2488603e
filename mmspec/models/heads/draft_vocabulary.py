"""Vocabularies of heads that draft a part of the target's tokens, such as the frequent ones.

`d2t` (V',) int64 is the target's id minus the head's, `t2d` (V,) bool marks the target's ids in it,
as in public checkpoints. A head with the target's vocabulary has neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class DraftVocabulary(nn.Module):
    """A head whose configuration has a `draft_vocab_size` (None = all of `vocab_size`)."""

    config: Any
    device: torch.device
    d2t: Tensor  # (V',) int64: the target's id minus the head's
    t2d: Tensor  # (V,) bool: target ids in the draft vocabulary

    @property
    def has_draft_vocabulary(self) -> bool:
        return self.draft_vocab_size != int(self.config.vocab_size)

    @property
    def draft_vocab_size(self) -> int:
        return int(self.config.draft_vocab_size or self.config.vocab_size)

    def register_vocabulary(self) -> None:
        """Register the maps of the first tokens, where the head has a vocabulary of its own."""
        size = self.draft_vocab_size
        if self.has_draft_vocabulary:
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(self.config.vocab_size) < size)

    def check(self) -> None:
        """Refuse a map with repeated or out-of-range target ids. Raises ValueError."""
        if not self.has_draft_vocabulary:
            return
        ids, size = self.token_ids, self.config.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ValueError(
                f"d2t maps to tokens {int(ids.min())} to {int(ids.max())}, but the target has "
                f"{size} (0 to {size - 1}); the head was made for another vocabulary, or its map "
                "is damaged"
            )
        is_mapped = torch.zeros_like(self.t2d)
        is_mapped[ids] = True
        if len(ids.unique()) != len(ids) or not torch.equal(is_mapped, self.t2d):
            raise ValueError(
                "d2t and t2d hold different tokens, or one twice; the map is damaged, copy or "
                "convert the head again"
            )

    def expand_logits(self, logits: Tensor) -> Tensor:  # (..., V') -> (..., V)
        """Expand logits to the target's vocabulary; other tokens get -inf."""
        if not self.has_draft_vocabulary:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return wide.index_copy(-1, self.token_ids, logits)

    @property
    def token_ids(self) -> Tensor:  # (V',)
        """The target's ids of the draft vocabulary, in its order."""
        if not self.has_draft_vocabulary:
            return torch.arange(self.config.vocab_size, device=self.device)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def set_draft_vocabulary(self, token_ids: Tensor) -> None:  # (V',)
        """Set the draft vocabulary, before training.

        Raises ValueError unless these are `draft_vocab_size` different ids of the target.
        """
        ids, size = token_ids.unique(), self.draft_vocab_size
        wrong = len(ids) != size or len(token_ids) != size
        if wrong or int(ids[0]) < 0 or int(ids[-1]) >= self.config.vocab_size:
            raise ValueError(
                f"{len(token_ids)} ids ({len(ids)} different) are not a choice of {size} out of "
                f"{self.config.vocab_size}; give draft_vocab_size different ids of the target"
            )
        if self.has_draft_vocabulary:
            self.d2t.copy_(ids.to(self.d2t) - torch.arange(size, device=self.d2t.device))
            self.t2d.zero_()
            self.t2d[ids.to(self.t2d.device)] = True

    def choose_vocabulary(self, counts: Tensor) -> None:  # (V,)
        """Set the draft vocabulary to the most frequent tokens; ties go to the smaller id."""
        if self.has_draft_vocabulary:
            by_count = counts.sort(descending=True, stable=True).indices
            self.set_draft_vocabulary(by_count[: self.draft_vocab_size])
