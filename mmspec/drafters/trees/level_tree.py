"""Trees that grow level by level, with a topology per row: the part that all of them share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    GrownDraft,
    Layout,
    empty_growth,
)
from mmspec.drafters.trees.ranked_tree import RankedTree
from mmspec.errors import check_number
from mmspec.targets.tokens.context import Context
from mmspec.trees import all_true_mask


@dataclass(frozen=True)
class Front:
    """The nodes whose children are drafted next, M of them; at first the context."""

    level: int
    score: Tensor  # (B, M) `Children.grow` of the nodes
    log_q: Tensor  # (B, M) log probability of their paths


@dataclass(frozen=True)
class Children:
    """The candidates below the nodes of a front, `beam` of each."""

    tokens: Tensor  # (B, M, beam)
    grow: Tensor  # (B, M, beam) the best are read next
    keep: Tensor  # (B, M, beam) the best of all levels are drafted; none above its parent's
    log_q: Tensor  # (B, M, beam) log probability of the paths

    def flatten(self) -> Children:  # (B, M * beam) each
        """All candidates of a row in a line; what is one tensor here is one in the result."""
        keep = self.keep.flatten(1)
        grow = keep if self.grow is self.keep else self.grow.flatten(1)
        log_q = grow if self.log_q is self.grow else self.log_q.flatten(1)
        return Children(self.tokens.flatten(1), grow, keep, log_q)

    def best(self, beam: int) -> tuple[Tensor, Tensor, Tensor]:  # (B, beam) each
        """Of flat candidates, the scores, places and log probabilities of those read next."""
        score, places = self.grow.topk(beam, -1)
        log_q = score if self.log_q is self.grow else self.log_q.gather(1, places)
        return score, places, log_q


Ranking = Callable[[Categorical, Front], Children]


class LevelTree(RankedTree):
    """Grow the best `beam` paths for `depth` levels, then keep the best `nodes` of all candidates.

    Subclasses rank the candidates. With a `threshold` above 0, only candidates whose `keep` is
    above its logarithm are drafted, and no level is read below which there can be none; each level
    then reads once from the device. Raises ValueError for invalid sizes.
    """

    beam: int
    nodes: int
    threshold: float = 0.0
    sizes: ClassVar[tuple[str, ...]] = ("depth", "beam", "nodes")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("threshold", self.threshold, 0, 1, example=0.01)

    @property
    def fixed_reads(self) -> int | None:
        return None if self.threshold else self.beam * (self.depth - 1)

    @abstractmethod
    def begin_ranking(
        self, distribution: Categorical, context: Context, kind: Kind, depth: int
    ) -> Ranking:
        """How this draft ranks candidates; `distribution` is that after the context."""

    def is_deep_enough(self, levels: int, score: Tensor) -> bool:  # (B, beam)
        """Whether no further level is read, from the scores of the front; it may read them."""
        return bool(self.threshold) and not bool((score > math.log(self.threshold)).any())

    def grow_levels(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, depth: int
    ) -> GrownDraft:
        batch, device = context.batch, context.device
        distribution = model.predict_first(context, state)
        distributions = [distribution]
        beam = min(self.beam, distribution.size)
        fixed = _constants(batch, beam, depth, device)
        rank = self.begin_ranking(distribution, context, kind, depth)
        found = rank(distribution, Front(0, fixed.zero, fixed.zero)).flatten()
        kept, tokens, fronts = [found.keep], [found.tokens], [fixed.context]
        best, parent, visible = fixed.beam, fixed.no_parents, fixed.itself
        front = Front(1, found.grow, found.log_q)
        read: tuple[Tensor, ...] = ()
        for level in range(1, depth):
            if self.is_deep_enough(level, front.score):
                fixed = _constants(batch, beam, level, device)
                break
            token = tokens[-1].gather(1, best) if level > 1 else tokens[-1]
            fronts.append(best)
            start = 1 + (level - 2) * beam if level > 1 else 0
            layout = Layout(fixed.depths[level - 1], visible, known_parents=(parent, start))
            distribution = model.predict(context, state, DraftNodes(token, layout, read))
            distributions.append(distribution)
            read += (token,)
            found = rank(distribution, front).flatten()
            kept.append(found.keep)
            tokens.append(found.tokens)
            if level + 1 < depth:
                score, best, log_q = found.best(beam)
                parent = best // beam  # in the front before
                front = Front(level + 1, score, log_q)
                visible = torch.cat((visible[fixed.rows, parent], fixed.itself), 2)
        joined = (torch.cat(one, 1) for one in (kept, tokens, fronts))
        draft = self._select(_Candidates(*joined), kind, fixed)
        if not draft.nodes:
            return empty_growth(context, distributions)
        if kind is Kind.WOR:
            draft = _with_distributions(draft, distributions)
        return GrownDraft(draft, None, distributions, beam * (fixed.depth - 1))

    def _select(self, candidates: _Candidates, kind: Kind, fixed: _Constants) -> Draft:
        """The draft of the best candidates, those above the threshold."""
        if not self.threshold:
            return candidates.select_best(self.nodes, kind, fixed)
        likely = candidates.score > math.log(self.threshold)
        count = min(self.nodes, int(likely.sum(1).max()))
        return candidates.select_best(count, kind, fixed, likely)


def _with_distributions(draft: Draft, distributions: list[Categorical]) -> Draft:
    """The draft with the distribution that every node was drawn from."""
    assert draft.read_order is not None
    after = draft.read_order.gather(1, draft.parents.clamp_min(0)) + 1
    places = torch.where(draft.parents < 0, 0, after)
    rows = torch.arange(draft.batch, device=places.device)[:, None]
    return replace(draft, distribution=Categorical.cat(distributions)[rows, places])


@dataclass(frozen=True)
class _Constants:
    """What all trees of these sizes share."""

    depth: int
    rows: Tensor  # (B, 1)
    zero: Tensor  # (B, 1) 0., the scores of the context
    context: Tensor  # (B, 1) -1, the parent of the first level
    beam: Tensor  # (B, beam) 0, 1, ...
    no_parents: Tensor  # (B, beam) 0
    itself: Tensor  # (B, beam, beam) bool
    depths: tuple[Tensor, ...]  # (1, beam) of every level
    parent_column: Tensor  # (C,) of a candidate's parent in the context and all fronts
    unread: Tensor  # (B, C) -1
    order: Tensor  # (B, n) 0, 1, ... of the n nodes read
    starts: Tensor  # (1 + n,) candidate index of the first child of each front; 0 for two fronts


@lru_cache(maxsize=64)
def _constants(batch: int, beam: int, depth: int, device: torch.device) -> _Constants:
    index = torch.arange(beam * depth, device=device)
    later = index[: beam * (depth - 1)].repeat_interleave(beam) + 1
    columns = torch.cat((torch.zeros_like(index[:beam]), later))
    return _Constants(
        depth,
        torch.arange(batch, device=device)[:, None],
        torch.zeros(batch, 1, device=device),
        torch.full((batch, 1), -1, device=device),
        index[:beam].expand(batch, -1),
        torch.zeros(batch, beam, dtype=torch.int64, device=device),
        torch.eye(beam, dtype=torch.bool, device=device).expand(batch, -1, -1),
        tuple(torch.full((1, beam), level, device=device) for level in range(depth)),
        columns,
        torch.full((batch, len(columns)), -1, device=device),
        index[: beam * (depth - 1)].expand(batch, -1),
        torch.tensor(
            [0] * min(1 + beam, 1 + beam * (depth - 1))
            + [beam + level * beam * beam for level in range(depth - 2) for _ in range(beam)],
            device=device,
        ),
    )


@dataclass(frozen=True)
class _Candidates:
    """All candidates of a tree, in the order they were scored."""

    score: Tensor  # (B, C)
    token: Tensor  # (B, C)
    fronts: Tensor  # (B, 1 + n) place of the nodes read in their level, after the context's -1

    def select_best(
        self, nodes: int, kind: Kind, fixed: _Constants, likely: Tensor | None = None
    ) -> Draft:
        """Build the draft of the best candidates; those not `likely` (B, C) are no proposals.

        A child never scores above its parent, and ties favour the earlier one.
        """
        order = self.score.sort(dim=1, descending=True, stable=True).indices
        selected = order[:, :nodes].sort(1).values
        fronts = self.fronts + fixed.starts
        parents = fronts.gather(1, fixed.parent_column[selected])
        read_order = fixed.unread.scatter(1, fronts[:, 1:], fixed.order)
        mask = all_true_mask(*selected.shape, selected.device)
        return Draft(
            self.token.gather(1, selected),
            torch.searchsorted(selected, parents, right=True) - 1,  # that of the context is -1
            mask if likely is None else likely.gather(1, selected),
            kind,
            padded=likely is not None,
            max_depth=min(fixed.depth, selected.shape[1]),
            read_order=read_order.gather(1, selected),
        )
