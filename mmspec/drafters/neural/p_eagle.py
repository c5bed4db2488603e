"""Drafting with a P-EAGLE head: all tokens of a draft in one run of the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmspec._attributes import delegate_to
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    committed_prefix,
    draft_distribution,
    predict_ahead,
)
from mmspec.drafters.neural.feature_head import FeatureDraft, HeadState
from mmspec.drafters.neural.target_heads import HeadKind
from mmspec.models.heads.p_eagle import PEagleHead
from mmspec.recipe import STATES
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class PEagleDraft(DraftModel):
    """Distributions of the next tokens from one run of an EAGLE-3 head (P-EAGLE).

    The true slots are those of `FeatureDraft`. Slots of unknown tokens follow them in the same run:

        slot   b|a   c|b  [?|m   ?|m ]    ? the mask token, m the learned state

    Only true slots stay in the cache. Raises ValueError at construction for a head of another
    target.
    """

    backbone: Reader  # the target's
    head: PEagleHead
    slots: FeatureDraft = field(init=False, repr=False)
    sees: ClassVar[str] = STATES
    is_parallel: ClassVar[bool] = True

    required_features = delegate_to("slots.required_features")

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", FeatureDraft(self.backbone, self.head))

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.head,)

    @property
    def max_depth_ahead(self) -> int:
        return self.head.config.num_depths

    def compile_blocks(self, make_graphs: Callable[..., Any]) -> bool:
        return self.slots.compile_blocks(make_graphs)

    def begin(self, context: Context) -> _State:
        return _State(self.slots.begin(context))

    def predict_first(self, context: Context, state: _State) -> Categorical:
        count = self.max_depth_ahead
        shape, mask = (context.batch, count - 1), self.head.config.mask_token_id
        masks = torch.full(shape, mask, device=context.device)
        states = self.head.mask_states(count - 1)
        unknown = Draft.chain(masks, Kind.DET)
        out = self.slots.read_committed(context, state.slots, unknown, states)
        state.logits = self.slots.logits(context, out[:, -count:])
        return draft_distribution(context, state.logits[:, :1], committed_prefix(context))

    def predict(self, context: Context, state: _State, nodes: DraftNodes) -> Categorical:
        assert state.logits is not None
        return predict_ahead(context, state.logits, nodes)

    def keep(self, context: Context, state: _State, update: DraftUpdate) -> _State:
        return _State(self.slots.keep(context, state.slots, update))


@dataclass
class _State:
    """The state of a request."""

    slots: HeadState
    logits: Tensor | None = None  # (B, K, V) of this round

    def join(self, other: _State) -> None:
        """Append the rows of another request."""
        self.slots.join(other.slots)
        self.logits = None

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.slots.drop(row)
        self.logits = None


def _mask_token(target: Reader) -> dict[str, Any]:
    return {"mask_token_id": target.vocabulary - 1}


P_EAGLE_HEAD = HeadKind(PEagleHead, PEagleDraft, "P-EAGLE head", sizes=_mask_token)
