"""Dynamic trees: every round and row grows its own topology from the drafter's probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import DraftModel, DraftNodes, GrownDraft, Layout
from mmspec.drafters.trees.draws import ranking
from mmspec.drafters.trees.ranked_tree import RankedTree
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class DynamicTree(RankedTree):
    """The tree of EAGLE-2 (Li et al. 2024, section 4).

    Grow the most probable `beam` paths for `depth` levels, then keep the best `nodes` of all
    candidates. Every row has its own topology. Raises ValueError for invalid sizes.
    """

    depth: int = 5
    beam: int = 8
    nodes: int = 24
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    sizes: ClassVar[tuple[str, ...]] = ("depth", "beam", "nodes")

    @property
    def description(self) -> str:
        return f"dynamic tree of {self.nodes} nodes"

    def grow_levels(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, depth: int
    ) -> GrownDraft:
        batch, device = context.batch, context.device
        distribution = model.predict_first(context, state)
        distributions = [distribution]
        beam = min(self.beam, distribution.size)
        pool = _Pool(batch, device)
        scored = ranking(distribution, kind, context.noise, context.position())
        pool.add(*scored.topk(beam, -1), parents=torch.full((batch, 1), -1, device=device))
        front = torch.arange(beam, device=device).expand(batch, -1)  # candidate index of the beam
        visible_before = torch.zeros(batch, beam, 0, dtype=torch.bool, device=device)
        read: tuple[Tensor, ...] = ()
        for level in range(1, depth):
            itself = torch.eye(beam, dtype=torch.bool, device=device).expand(batch, -1, -1)
            visible = torch.cat((visible_before, itself), 2)
            layout = Layout(torch.full((1, beam), level - 1, device=device), visible)
            pool.read(front)
            nodes = DraftNodes(pool.tokens(front), layout, read)
            distribution = model.predict(context, state, nodes)
            distributions.append(distribution)
            read += (nodes.tokens,)
            scored = ranking(distribution, kind, context.noise, context.position() + level)
            start = pool.size
            pool.add(*(pool.scores(front)[..., None] + scored).topk(beam, -1), parents=front)
            best = pool.score[:, start:].topk(beam, -1).indices  # (B, beam) among beam * beam
            visible_before = visible.gather(
                1, (best // beam)[..., None].expand(-1, -1, visible.shape[2])
            )
            front = start + best
        return pool.select_best(min(self.nodes, pool.size), kind, distributions)


class _Pool:
    """Candidates of a dynamic tree, in the order they were scored."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.score = torch.empty(batch, 0, device=device)
        self.token = torch.empty(batch, 0, dtype=torch.int64, device=device)
        self.parent = torch.empty(batch, 0, dtype=torch.int64, device=device)
        self.place = torch.empty(batch, 0, dtype=torch.int64, device=device)
        self.reads = 0

    @property
    def size(self) -> int:
        return self.score.shape[1]

    def add(self, score: Tensor, token: Tensor, parents: Tensor) -> None:  # (B, n, k) x2, (B, n)
        width = score.shape[-1]
        self.score = torch.cat((self.score, score.flatten(1).float()), 1)
        self.token = torch.cat((self.token, token.flatten(1)), 1)
        self.parent = torch.cat((self.parent, parents.repeat_interleave(width, 1)), 1)
        unread = torch.full_like(token.flatten(1), -1)
        self.place = torch.cat((self.place, unread), 1)

    def read(self, index: Tensor) -> None:
        count = index.shape[1]
        places = torch.arange(self.reads, self.reads + count, device=index.device)
        self.place = self.place.scatter(1, index, places.expand_as(index))
        self.reads += count

    def tokens(self, index: Tensor) -> Tensor:
        return self.token.gather(1, index)

    def scores(self, index: Tensor) -> Tensor:
        return self.score.gather(1, index)

    def select_best(self, nodes: int, kind: Kind, distributions: list[Categorical]) -> GrownDraft:
        """Build the draft of the best candidates.

        A child never scores above its parent, and ties favour the earlier one.
        """
        order = self.score.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
        selected = order.sort(1).values
        parents = self.parent.gather(1, selected)
        new_parents = torch.searchsorted(selected, parents.clamp_min(0))
        parents = torch.where(parents < 0, -1, new_parents)
        mask = torch.ones_like(selected, dtype=torch.bool)
        draft = Draft(self.token.gather(1, selected), parents, mask, kind, padded=False)
        return GrownDraft(draft, self.place.gather(1, selected).tolist(), distributions)
