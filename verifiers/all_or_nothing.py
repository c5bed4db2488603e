"""A walk that accepts a whole draft or none of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Rule, Scores, Verdict, Verifier
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.walk import check_draft, verify_empty


@dataclass(frozen=True)
class AllOrNothing(Verifier):
    """Accept a chain if `rule` accepts all of its tokens, else sample the next token from p.

    The published script of CTC-SSD (Saon et al. 2026) restarts from the context if a single token
    fails. At least as lossy as `Recursive` with the same rule. The exact rule does not stay exact,
    because the accepted part of a rejected draft is dropped. Greedy decoding is as exact as with
    the rule.
    """

    rule: Rule = field(default_factory=Exact)
    lossless: ClassVar[bool] = False
    uses_trees: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False)
        if not draft.nodes:
            return verify_empty(scores, noise)
        verdict = Recursive(self.rule).verify(draft, scores, noise)
        assert verdict.next is not None
        whole = verdict.length == draft.mask.sum(-1)
        first = noise.pick(as_categorical(scores.distribution)[:, 0].probs, Lane.OTHER)
        return replace(
            verdict,
            path=torch.where(whole[:, None], verdict.path, -1),
            length=torch.where(whole, verdict.length, 0),
            next=torch.where(whole, verdict.next, first),
        )
