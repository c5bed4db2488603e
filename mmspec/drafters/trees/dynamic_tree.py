"""Dynamic trees: every round and row grows its own topology from the drafter's probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import DraftModel, DraftNodes, GrownDraft, Layout
from mmspec.drafters.trees.draws import draw_noise, perturb_level
from mmspec.drafters.trees.ranked_tree import RankedTree
from mmspec.targets.tokens.context import Context
from mmspec.trees import all_true_mask


@dataclass(frozen=True)
class BeamMass:
    """Grow on while the paths of the front have at least log mass `limit` (DDD, Brown et al. 2024).

    Asked after `first` levels, and after every `every` further ones; each time is read from the
    device. Rows of a batch grow alike: the largest mass decides.
    """

    limit: float = -1.0
    first: int = 3
    every: int = 2

    def ends_at(self, levels: int, score: Tensor) -> bool:  # (B, beam) log probabilities of paths
        """Whether a tree of so many levels is deep enough."""
        is_asked = levels >= self.first and (levels - self.first) % self.every == 0
        return is_asked and not bool((score.logsumexp(-1) > self.limit).any())


@dataclass(frozen=True)
class DynamicTree(RankedTree):
    """The tree of EAGLE-2 (Li et al. 2024, section 4).

    Grow the most probable `beam` paths for `depth` levels, then keep the best `nodes` of all
    candidates. Every row has its own topology. `stop` ends it before. Raises ValueError for
    invalid sizes.
    """

    depth: int = 5
    beam: int = 8
    nodes: int = 24
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    stop: BeamMass | None = None
    sizes: ClassVar[tuple[str, ...]] = ("depth", "beam", "nodes")

    @property
    def description(self) -> str:
        return f"dynamic tree of {self.nodes} nodes"

    @property
    def fixed_reads(self) -> int | None:
        return self.beam * (self.depth - 1) if self.stop is None else None

    def grow_levels(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, depth: int
    ) -> GrownDraft:
        batch, device = context.batch, context.device
        distribution = model.predict_first(context, state)
        distributions = [distribution]
        beam = min(self.beam, distribution.size)
        fixed = _constants(batch, beam, depth, device)
        noise = draw_noise(distribution, kind, context, depth)
        values, ids = perturb_level(distribution, noise, 0).log_softmax(-1).topk(beam, -1)
        score, token = values.flatten(1).float(), ids.flatten(1)  # (B, beam) of the front
        scores, tokens, fronts = [score], [token], [fixed.context, fixed.beam]
        visible, parents = fixed.itself, (fixed.no_parents, 0)
        read: tuple[Tensor, ...] = ()
        for level in range(1, depth):
            layout = Layout(fixed.depths[level - 1], visible, known_parents=parents)
            distribution = model.predict(context, state, DraftNodes(token, layout, read))
            distributions.append(distribution)
            read += (token,)
            scored = perturb_level(distribution, noise, level).log_softmax(-1)
            values, ids = scored.topk(beam, -1)  # (B, beam, beam)
            scores.append((score[..., None] + values).flatten(1))
            tokens.append(ids.flatten(1))
            if level + 1 == depth:
                break
            score, best = scores[-1].topk(beam, -1)
            if self.stop is not None and self.stop.ends_at(level + 1, score):
                fixed = _constants(batch, beam, level + 1, device)
                break
            token, parent = tokens[-1].gather(1, best), best // beam  # of the front before
            fronts.append(best)
            visible = torch.cat((visible[fixed.rows, parent], fixed.itself), 2)
            parents = (parent, 1 + (level - 1) * beam)
        joined = (torch.cat(one, 1) for one in (scores, tokens, fronts))
        draft = _Candidates(*joined).select_best(self.nodes, kind, fixed)
        return GrownDraft(draft, None, distributions, beam * (fixed.depth - 1))


@dataclass(frozen=True)
class _Constants:
    """What all trees of these sizes share."""

    depth: int
    rows: Tensor  # (B, 1)
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
    """All candidates of a dynamic tree, in the order they were scored."""

    score: Tensor  # (B, C)
    token: Tensor  # (B, C)
    fronts: Tensor  # (B, 1 + n) place of the nodes read in their level, after the context's -1

    def select_best(self, nodes: int, kind: Kind, fixed: _Constants) -> Draft:
        """Build the draft of the best candidates.

        A child never scores above its parent, and ties favour the earlier one.
        """
        order = self.score.sort(dim=1, descending=True, stable=True).indices
        selected = order[:, :nodes].sort(1).values
        fronts = self.fronts[:, : len(fixed.starts)] + fixed.starts
        parents = fronts.gather(1, fixed.parent_column[selected])
        bounds = torch.cat((fixed.context, selected), 1)
        read_order = fixed.unread.scatter(1, fronts[:, 1:], fixed.order)
        return Draft(
            self.token.gather(1, selected),
            torch.searchsorted(bounds, parents) - 1,
            all_true_mask(*selected.shape, selected.device),
            kind,
            padded=False,
            max_depth=fixed.depth,
            read_order=read_order.gather(1, selected),
        )
