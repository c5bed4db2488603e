"""Chains of a draft model that predicts several tokens at once, drawn together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    GrownDraft,
    Layout,
    empty_growth,
    step_indices,
)
from mmspec.drafters.lengths.length import max_useful_length, useful_lengths
from mmspec.drafters.shapes import SAMPLED_KINDS, Shape
from mmspec.drafters.trees.draws import draw
from mmspec.errors import check_number
from mmspec.recipe import LINEAR
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class ParallelChain(Shape):
    """A chain of `length` tokens in two calls of the draft model; None = as many as it predicts.

    Distributions do not depend on the drafted tokens, so all tokens are drawn at once. Logits
    processors that read a prefix are given its likeliest token in place of the drafted ones. Raises
    ValueError at construction of the drafter for a draft model whose distributions do depend on
    them.
    """

    length: int | None = None
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.IID, Kind.WOR, Kind.DET, Kind.HUB)
    walk: ClassVar[str] = LINEAR

    def __post_init__(self) -> None:
        if self.length is not None:
            check_number("length", self.length, 1, whole=True, example=7)

    @property
    def description(self) -> str:
        return "chain of a whole block" if self.length is None else f"chain of {self.length}"

    @property
    def max_depth(self) -> int:
        return self.length or 1

    def limit_depth(self, reach: int) -> ParallelChain:
        return replace(self, length=reach) if self.length is None else self

    def check(self, model: DraftModel) -> None:
        if not model.is_parallel:
            raise ValueError(
                f"the distributions of a {type(model).__name__} depend on the tokens before them, "
                "but this chain draws all tokens at once; give length="
            )

    def grow(
        self, model: DraftModel, context: Context, state: Any, shape_state: Any, kind: Kind
    ) -> GrownDraft:
        count = min(self.max_depth, max_useful_length(context))
        if not count:
            return empty_growth(context)
        distribution = model.predict_first(context, state)
        if count > 1:
            layout = _chain(count - 1, context.device)
            likeliest = distribution.scores.argmax(-1).expand(-1, count - 1)
            later = model.predict(context, state, DraftNodes(likeliest, layout))
            distribution = Categorical.cat([distribution, later])
        steps = step_indices(context.device)[:count]
        position = context.position() + steps
        tokens = draw(distribution, 1, kind, context.noise, position, steps)[:, :, 0]
        sampled = distribution if kind in SAMPLED_KINDS else None
        ends = useful_lengths(context, count)
        mask = None if ends is None else steps < ends[:, None]
        return GrownDraft(Draft.chain(tokens, kind, sampled, mask), [()], [distribution])


@lru_cache(maxsize=64)
def _chain(count: int, device: torch.device) -> Layout:
    """`count` nodes that follow each other."""
    steps = torch.arange(count, device=device)[None]
    return Layout(steps, (steps <= steps.mT)[None])
