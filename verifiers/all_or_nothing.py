"""A walk that keeps a whole draft or none of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Rule, Scores, Verdict, Verifier, categorical
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.walk import check, nothing


@dataclass(frozen=True)
class AllOrNothing(Verifier):
    """Keep a chain if `rule` accepts all of its tokens, else go on from the context by p.

    The published script of CTC-SSD (Saon et al. 2026) starts anew where a single token fails. As
    lossy as `Recursive` with the same rule, or more; the exact rule does not stay exact, because
    what was right about a refused draft is forgotten. Greedy decoding is as exact as with the rule.
    """

    rule: Rule = field(default_factory=Exact)
    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False)
        if not draft.nodes:
            return nothing(scores, noise)
        verdict = Recursive(self.rule).verify(draft, scores, noise)
        assert verdict.next is not None
        whole = verdict.length == draft.mask.sum(-1)
        first = noise.pick(categorical(scores.distribution)[:, 0].probs, Lane.OTHER)
        return replace(
            verdict,
            path=torch.where(whole[:, None], verdict.path, -1),
            length=torch.where(whole, verdict.length, 0),
            next=torch.where(whole, verdict.next, first),
        )
