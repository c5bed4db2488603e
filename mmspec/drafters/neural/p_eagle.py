"""Drafting with a P-EAGLE head: all tokens of a draft in one run of the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.draft import Draft, Kind
from mmspec.drafters.neural.feature_head import HeadState
from mmspec.drafters.neural.parallel_slots import ParallelSlots
from mmspec.drafters.neural.target_heads import HeadKind
from mmspec.models.heads.p_eagle import PEagleHead
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class PEagleDraft(ParallelSlots):
    """Distributions of the next tokens from one run of an EAGLE-3 head (P-EAGLE).

    The true slots are those of `FeatureDraft`. Slots of unknown tokens follow them in the same run:

        slot   b|a   c|b  [?|m   ?|m ]    ? the mask token, m the learned state

    Only true slots stay in the cache. Raises ValueError at construction for a head of another
    target.
    """

    head: PEagleHead

    @property
    def max_depth_ahead(self) -> int:
        return self.head.config.num_depths

    def read_ahead(self, context: Context, state: HeadState) -> Tensor:
        count = self.max_depth_ahead
        shape, mask = (context.batch, count - 1), self.head.config.mask_token_id
        masks = torch.full(shape, mask, device=context.device)
        states = self.head.mask_states(count - 1)
        unknown = Draft.chain(masks, Kind.DET)
        return self.slots.read_committed(context, state, unknown, states)[:, -count:]


def _mask_token(target: Reader) -> dict[str, Any]:
    return {"mask_token_id": target.vocabulary - 1}


P_EAGLE_HEAD = HeadKind(PEagleHead, PEagleDraft, "P-EAGLE head", sizes=_mask_token)
