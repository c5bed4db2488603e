"""A top-down walk: at each node, offer its children to a rule one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.draft import Draft, Kind, Rule, Scores, Verdict, categorical
from mmspec.noise import Lane, Noise
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.walk import Family, check, descend, nothing, proposal, proposals, without


@dataclass(frozen=True)
class Recursive:
    """Recursive rejection sampling with any rule, as lossless as the rule.

    A chain is speculative sampling (Leviathan et al. 2023). IID siblings: q stays (SpecInfer, Miao
    et al. 2024; a duplicate is a draw of its own). WOR siblings: q loses the siblings before (RSD,
    Jeon et al. 2024; Sequoia, Chen et al. 2024; EAGLE-1). DET siblings: q is a point mass on each
    (EAGLE-2 and 3). After a rejection p becomes the rule's residual; below the last node the next
    token comes from p. Where q is exhausted the sibling counts as chosen, which is exact for
    Sequoia's uniform fallback too.
    """

    rule: Rule = field(default_factory=Exact)
    trees: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.WOR, Kind.IID, Kind.DET)

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft)
        if not draft.nodes:
            return nothing(scores, noise)
        if draft.is_chain:
            return self._chain(draft, scores, noise)

        def step(family: Family, noise: Noise, lane: int) -> tuple[Tensor, Tensor]:
            return self._siblings(family, draft.kind, noise, lane)

        return descend(draft, scores, noise, step)

    def _chain(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        p = categorical(scores.law).probs
        q = proposals(draft, p)
        x, batch = draft.tokens, torch.arange(draft.batch, device=p.device)
        hits = noise.flip(self.rule.accept(p[:, :-1], q, x), Lane.ACCEPT) & draft.mask
        kept = hits.cumprod(-1)
        length = kept.sum(-1)
        stop = length.clamp_max(draft.nodes - 1)  # the node that failed, if one did
        failed = (length < draft.nodes) & draft.mask[batch, stop]
        end = p[batch, length]
        left = self.rule.residual(end, q[batch, stop], x[batch, stop])
        path = kept * torch.arange(1, draft.nodes + 1, device=p.device) - 1
        weights = torch.where(failed[:, None], left, end)
        return Verdict(path, length, noise.pick(weights, Lane.RESIDUAL))

    def _siblings(
        self, family: Family, kind: Kind, noise: Noise, lane: int
    ) -> tuple[Tensor, Tensor]:
        p, q = family.p, family.q
        slot = torch.full_like(family.last, -1)
        for j, x in enumerate(family.tokens.unbind(1)):
            tested = family.real[:, j] & (slot < 0)
            drawn = proposal(q, x, kind)
            chance = torch.where(tested, self.rule.accept(p, drawn, x), 0)
            hit = noise.flip(chance, lane + j)
            slot = torch.where(hit, j, slot)
            p = torch.where((tested & ~hit)[:, None], self.rule.residual(p, drawn, x), p)
            if kind is Kind.WOR:
                q = torch.where(tested[:, None], without(q, x), q)
        return slot, p
