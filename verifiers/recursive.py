"""A top-down walk: at each node, test its children with a rule, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import Flips, Lane, Noise
from mmspec.draft import Draft, Kind, Rule, RuleSchedule, Scores, Verdict, Verifier
from mmspec.verifiers.branches import reject_one_by_one, verify_branches
from mmspec.verifiers.distances import ClosedForm, excess
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.walk import (
    Siblings,
    check_draft,
    child_lanes,
    descend,
    draft_depth,
    is_all_false,
    proposal,
    proposals,
    remove_token,
    rule_at_depth,
    verify_empty,
    verify_greedy,
)


@dataclass(frozen=True)
class Recursive(Verifier):
    """Recursive rejection sampling with any rule, as lossless as the rule.

    A chain is speculative sampling (Leviathan et al. 2023). IID siblings: q is unchanged
    (SpecInfer, Miao et al. 2024; duplicates are separate samples). WOR siblings: earlier siblings
    are removed from q (RSD, Jeon et al. 2024; Sequoia, Chen et al. 2024; EAGLE-1). DET siblings: q
    is a point mass on each (EAGLE-2 and 3). After a rejection p becomes the rule's residual; below
    the last node the next token comes from p. A sibling beyond the support of q counts as
    deterministic, which is also exact for Sequoia's uniform fallback. The verdict of a relaxed rule
    has its over-accepted mass, summed over the tested tokens: the rule's own `bias`, else
    `mmspec.verifiers.distances.excess`.
    """

    rule: Rule | RuleSchedule = field(default_factory=Exact)
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.WOR, Kind.IID, Kind.DET)

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft)
        if not draft.nodes:
            return verify_empty(scores, noise)
        greedy = verify_greedy(draft, scores) if self.lossless else None
        if greedy is not None:
            return greedy
        if draft.is_chain:
            return self._chain(draft, scores, noise)
        if self.rule == Exact():
            return verify_branches(
                draft, scores, noise, partial(reject_one_by_one, kind=draft.kind)
            )

        longest, over = draft_depth(draft), list[Tensor]()
        hits = noise.prepare_flips(child_lanes(draft))

        def step(family: Siblings, _noise: Noise, _lane: int) -> tuple[Tensor, Tensor]:
            rule = rule_at_depth(self.rule, family.depth, longest)
            slot, left, found = _siblings(rule, family, draft.kind, hits)
            over.append(found)
            return slot, left

        verdict = descend(draft, scores, noise, step)
        if self.lossless or not over:
            return verdict
        return replace(verdict, excess=torch.stack(over).sum(0))

    def _chain(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        p = as_categorical(scores.distribution).evaluate()
        q = proposals(draft, p.probs)
        x, batch = draft.tokens, torch.arange(draft.batch, device=draft.tokens.device)
        index = torch.arange(draft.nodes, device=x.device)
        rule = rule_at_depth(self.rule, index, draft.nodes)
        chance = rule.accept(p[:, :-1], q, x)
        hits = noise.flip(chance, Lane.ACCEPT) & draft.mask
        accepted = hits.cumprod(-1)
        length = accepted.sum(-1)
        stop = length.clamp_max(draft.nodes - 1)  # the node that failed, if any
        failed = (length < draft.nodes) & draft.mask[batch, stop]
        end = p[batch, length]
        last = rule_at_depth(self.rule, stop, draft.nodes)
        left = last.residual(end, q[batch, stop], x[batch, stop]).probs
        path = accepted * (index + 1) - 1
        weights = torch.where(failed[:, None], left, end.probs)
        verdict = Verdict(path, length, noise.pick(weights, Lane.RESIDUAL))
        if self.lossless:
            return verdict
        tested = draft.mask & (index <= length[:, None])
        over = _lost_mass(rule, p[:, :-1], q, x, chance)
        return replace(verdict, excess=(over * tested).sum(-1))


def _siblings(
    rule: Rule, family: Siblings, kind: Kind, hits: Flips
) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted slot (-1 = none), the next distribution, and the over-accepted mass (B,)."""
    p, q = family.p, family.q
    slot = torch.full_like(family.last, -1)
    over = torch.zeros_like(p.probs[:, 0])
    for j, x in enumerate(family.tokens.unbind(1)):
        left = family.real[:, j:] & (slot < 0)[:, None]
        if is_all_false(left):
            break
        tested = left[:, 0]
        drawn = proposal(q, x, kind)
        chance = torch.where(tested, rule.accept(p, drawn, x), 0)
        if not rule.lossless:
            over = over + torch.where(tested, _lost_mass(rule, p, drawn, x, chance), 0)
        hit = hits((family.depth, j), chance)
        slot = torch.where(hit, j, slot)
        missed = tested & ~hit
        if is_all_false(missed):
            continue
        p = Categorical.where(missed, rule.residual(p, drawn, x), p)
        if kind is Kind.WOR:
            q = Categorical.where(missed, Categorical.from_probs(remove_token(q.probs, x)), q)
    return slot, p.probs, over


def _lost_mass(rule: Rule, p: Categorical, q: Categorical, x: Tensor, chance: Tensor) -> Tensor:
    """The distance from the target that a test of x (...) adds, in closed form if known."""
    if isinstance(rule, ClosedForm):
        return rule.bias(p, q)
    return excess(p.probs, q.probs, x, chance)
