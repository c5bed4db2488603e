"""Drafting from the slots of a head that predicts several tokens in one run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from mmspec._attributes import delegate_to
from mmspec.distributions.categorical import Categorical
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    committed_prefix,
    draft_distribution,
    predict_ahead,
)
from mmspec.drafters.neural.feature_head import FeatureDraft, HeadState
from mmspec.recipe import STATES
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class ParallelSlots(DraftModel, ABC):
    """Distributions of the next tokens from one run over the slots of `FeatureDraft`.

    They do not depend on drafted tokens, so nothing but true slots is cached. Raises ValueError at
    construction for a head of another target.
    """

    backbone: Reader  # the target's
    head: Any
    slots: FeatureDraft = field(init=False, repr=False)
    sees: ClassVar[str] = STATES
    is_parallel: ClassVar[bool] = True

    required_features = delegate_to("slots.required_features")

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", FeatureDraft(self.backbone, self.head))

    @abstractmethod
    def read_ahead(self, context: Context, state: HeadState) -> Tensor:
        """Read the committed tokens; states (R, K, D) of the next K positions."""

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.head,)

    def compile_blocks(self, make_graphs: Callable[..., Any]) -> str:
        return self.slots.compile_blocks(make_graphs)

    def begin(self, context: Context) -> SlotsState:
        return SlotsState(self.slots.begin(context))

    def predict_first(self, context: Context, state: SlotsState) -> Categorical:
        state.logits = self.slots.logits(context, self.read_ahead(context, state.slots))
        return draft_distribution(context, state.logits[:, :1], committed_prefix(context))

    def predict(self, context: Context, state: SlotsState, nodes: DraftNodes) -> Categorical:
        assert state.logits is not None
        return predict_ahead(context, state.logits, nodes)

    def keep(self, context: Context, state: SlotsState, update: DraftUpdate) -> SlotsState:
        return SlotsState(self.slots.keep(context, state.slots, update))


@dataclass
class SlotsState:
    """The state of a request."""

    slots: HeadState
    logits: Tensor | None = None  # (B, K, V) of this round

    def join(self, other: SlotsState) -> None:
        """Append the rows of another request."""
        self.slots.join(other.slots)
        self.logits = None

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.slots.drop(row)
        self.logits = None
