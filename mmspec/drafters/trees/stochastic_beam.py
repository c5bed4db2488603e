"""Stochastic beam search: the paths of a level are drawn from q without replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane
from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import DraftModel, DraftNodes, GrownDraft, Layout
from mmspec.drafters.trees.ranked_tree import RankedTree
from mmspec.targets.tokens.context import Context
from mmspec.trees import all_true_mask


@dataclass(frozen=True)
class StochasticBeam(RankedTree):
    """Draw `beam` paths of each of `depth` levels without replacement (RSD-S, Jeon et al. 2024).

    A path's score is its log q plus Gumbel noise, where the noise of a child is conditional on the
    largest of its siblings being that of the parent (Kool et al. 2019). The children of a node are
    then draws from q without replacement, in the order of their scores, and whether a further one
    is kept depends on scores that are known before it is drawn: WOR proposals, exact with recursive
    rejection. Greedy decoding has no noise: the likeliest paths.
    """

    depth: int = 4
    beam: int = 4
    kinds: tuple[Kind, ...] = (Kind.WOR,)
    sizes: ClassVar[tuple[str, ...]] = ("depth", "beam")

    @property
    def description(self) -> str:
        return f"stochastic beam of {self.beam}"

    @property
    def fixed_reads(self) -> int:
        return self.beam * (self.depth - 1)

    def grow_levels(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, depth: int
    ) -> GrownDraft:
        batch, device = context.batch, context.device
        distribution = model.predict_first(context, state)
        distributions, beam = [distribution], min(self.beam, distribution.size)
        rows = torch.arange(batch, device=device)[:, None]
        log_q = score = torch.zeros(batch, 1, device=device)  # (B, paths): log q, and with noise
        tokens, parents, places = list[Tensor](), list[Tensor](), list[Tensor]()
        read: tuple[Tensor, ...] = ()
        visible = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
        itself = torch.eye(beam, dtype=torch.bool, device=device).expand(batch, -1, -1)
        for level in range(depth):
            log_q, score, best = self._select(distribution, context, level, log_q, score, beam)
            parent, token = best // distribution.size, best % distribution.size
            tokens.append(token)
            parents.append(parent + (level - 1) * beam if level else torch.full_like(parent, -1))
            places.append(parent + (1 + (level - 1) * beam if level else 0))
            if level + 1 == depth:
                break
            visible = torch.cat((visible[rows, parent], itself), 2)
            layout = Layout(torch.full((1, beam), level, device=device), visible)
            distribution = model.predict(context, state, DraftNodes(token, layout, read))
            distributions.append(distribution)
            read += (token,)
        return self._draft(tokens, parents, places, distributions, beam)

    def _select(
        self,
        distribution: Categorical,
        context: Context,
        level: int,
        log_q: Tensor,
        score: Tensor,
        beam: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log q and scores (B, beam) of the best paths, and their index among all children."""
        own = log_q[..., None] + distribution.scores.float().log_softmax(-1)  # (B, paths, V)
        ranked = own
        if not distribution.hard:
            paths = own.shape[1]
            index = torch.arange(paths, device=own.device) + level * self.beam
            noise = context.noise.fresh_keys(Lane.DRAFT, index).gumbel(distribution.size)
            ranked = condition_on_largest(own + noise, score[..., None])
        best = ranked.flatten(1).topk(beam, -1)
        return own.flatten(1).gather(1, best.indices), best.values, best.indices

    def _draft(
        self,
        tokens: list[Tensor],
        parents: list[Tensor],
        places: list[Tensor],
        distributions: list[Categorical],
        beam: int,
    ) -> GrownDraft:
        ids, place = torch.cat(tokens, 1), torch.cat(places, 1)
        count, num_read = ids.shape[1], beam * (len(tokens) - 1)
        order = torch.arange(count, device=ids.device)
        order = torch.where(order < num_read, order, -1).expand_as(ids)
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        drawn = Categorical.cat(distributions)
        draft = Draft(
            ids,
            torch.cat(parents, 1),
            all_true_mask(*ids.shape, ids.device),
            Kind.WOR,
            drawn[rows, place],
            padded=False,
            max_depth=len(tokens),
            read_order=order,
        )
        return GrownDraft(draft, None, distributions, num_read)


def condition_on_largest(scores: Tensor, largest: Tensor) -> Tensor:  # (..., V), (..., 1)
    """Gumbel scores, given that their maximum is `largest` (Kool et al. 2019, appendix B.3)."""
    top = scores.amax(-1, keepdim=True)
    gap = (-torch.expm1((scores - top).clamp_max(0))).log()  # log(1 - exp(score - top))
    shifted = largest - scores + gap
    found = largest - shifted.clamp_min(0) - torch.log1p(torch.exp(-shifted.abs()))
    return found.masked_fill(found.isnan(), -torch.inf)  # below an impossible path
