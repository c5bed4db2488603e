"""What trees have in common whose nodes are chosen by looking at them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from mmspec.draft import Kind
from mmspec.drafters.growth import DraftModel, Shape, Sprout, nothing
from mmspec.drafters.lengths.length import useful
from mmspec.errors import check_number
from mmspec.recipe import TREE
from mmspec.targets.tokens.context import Context


class RankedTree(Shape):
    """A tree of at most `depth` levels whose nodes are chosen by looking at them.

    So proposals are DET (V3 verifiers) or, with the target's own noise in the ranking, RACE
    (coupled verifier). Raises ValueError for sizes that are none.
    """

    depth: int
    walk: ClassVar[str] = TREE
    sizes: ClassVar[tuple[str, ...]]  # its fields that count from 1

    def __post_init__(self) -> None:
        for name in self.sizes:
            check_number(name, getattr(self, name), 1, whole=True, example=8)

    @property
    def longest(self) -> int:
        return self.depth

    def grow(self, model: DraftModel, context: Context, state: Any, own: Any, kind: Kind) -> Sprout:
        depth = min(self.depth, useful(context))
        if depth < 1:
            return nothing(context)
        return self.ranked(model, context, state, kind, depth)

    @abstractmethod
    def ranked(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, depth: int
    ) -> Sprout:
        """A draft of 1 to `depth` levels."""
