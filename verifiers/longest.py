"""A walk for rules that test every node independently: the longest path that passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Rule, Scores, Verdict, Verifier
from mmspec.verifiers.walk import check_draft, find_longest_path, verify_empty


@dataclass(frozen=True)
class Longest(Verifier):
    """Test all nodes at once and accept the longest path that passes (Medusa, Cai et al. 2024).

    Ties go to the higher log p. For rules that use p and x alone (`Typical`); they are called with
    q = p. The next token is sampled from the rule's residual at the end of the path, also below a
    leaf. Lossy, because the longest path favours tokens that the drafter prefers; with a point mass
    p it is greedy matching.
    """

    rule: Rule
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET, Kind.WOR, Kind.IID, Kind.HUB, Kind.RACE)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, distribution=False)
        if not draft.nodes:
            return verify_empty(scores, noise)
        distribution = as_categorical(scores.distribution)
        batch = torch.arange(draft.batch, device=draft.tokens.device)
        p = distribution[batch[:, None], draft.parents + 1]
        passed = noise.flip(self.rule.accept(p, p, draft.tokens), Lane.ACCEPT)
        tie = p.prob(draft.tokens).clamp_min(torch.finfo(p.probs.dtype).tiny).log()
        path, length, row = find_longest_path(draft, passed, tie)
        end = distribution[batch, row]
        left = self.rule.residual(end, end, end.probs.argmax(-1))
        return Verdict(path, length, noise.pick(left.probs, Lane.RESIDUAL))
