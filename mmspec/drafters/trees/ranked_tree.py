"""Base class of trees whose nodes are selected by identity."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from mmspec.draft import Kind
from mmspec.drafters.draft_model import DraftModel, GrownDraft, empty_growth
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.drafters.shapes import Shape
from mmspec.errors import check_number
from mmspec.recipe import TREE
from mmspec.targets.tokens.context import Context


class RankedTree(Shape):
    """A tree of at most `depth` levels whose nodes are selected by identity.

    So proposals are DET (V3 verifiers) or, with the target's own noise in the ranking, RACE
    (coupled verifier). Raises ValueError for invalid sizes.
    """

    depth: int
    walk: ClassVar[str] = TREE
    sizes: ClassVar[tuple[str, ...]]  # fields that must be at least 1

    def __post_init__(self) -> None:
        for name in self.sizes:
            check_number(name, getattr(self, name), 1, whole=True, example=8)

    @property
    def max_depth(self) -> int:
        return self.depth

    def grow(
        self, model: DraftModel, context: Context, state: Any, shape_state: Any, kind: Kind
    ) -> GrownDraft:
        depth = min(self.depth, max_useful_length(context))
        if depth < 1:
            return empty_growth(context)
        return self.grow_levels(model, context, state, kind, depth)

    @abstractmethod
    def grow_levels(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, depth: int
    ) -> GrownDraft:
        """Grow a draft of 1 to `depth` levels."""
