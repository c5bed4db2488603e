"""Drafting with an Amphista head: heads that attend to each other, all in one run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmspec.drafters.neural.feature_head import HeadState
from mmspec.drafters.neural.parallel_slots import ParallelSlots
from mmspec.drafters.neural.target_heads import HeadKind
from mmspec.models.heads.amphista import AmphistaHead
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class AmphistaDraft(ParallelSlots):
    """Distributions of the next tokens from the newest slot of an Amphista head (Li et al. 2024).

    The slots are those of `FeatureDraft`, with one cache per adaptation layer:

        token     a    b    c   [x    y    z ]      committed a b c, drafted x y z
        slot     b|a  c|b
        head           :         1    2    3        all from slot c|b

    Raises ValueError at construction for a head of another target.
    """

    head: AmphistaHead

    @property
    def max_depth_ahead(self) -> int:
        return self.head.reach

    def read_ahead(self, context: Context, state: HeadState) -> Tensor:
        return self.head.predict_block(self.slots.read_committed(context, state)[:, -1])


AMPHISTA_HEAD = HeadKind(AmphistaHead, AmphistaDraft, "Amphista head")
