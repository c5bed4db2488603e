"""A walk for rules that judge every node by itself: the longest path that passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Rule, Scores, Verdict, Verifier, categorical
from mmspec.verifiers.walk import check, longest, nothing


@dataclass(frozen=True)
class Longest(Verifier):
    """Test all nodes at once and keep the longest accepted path (Medusa, Cai et al. 2024).

    Ties go to the higher log p. For rules that look at p and x alone (`Typical`); they get q = p.
    The next token is drawn from the rule's residual where the path ends, also below a leaf. Lossy,
    because looking for the longest path favours what the drafter likes; with a point mass p it is
    greedy matching.
    """

    rule: Rule
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET, Kind.WOR, Kind.IID, Kind.HUB, Kind.RACE)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, distribution=False)
        if not draft.nodes:
            return nothing(scores, noise)
        distribution = categorical(scores.distribution)
        batch = torch.arange(draft.batch, device=draft.tokens.device)
        p = distribution[batch[:, None], draft.parents + 1]
        passed = noise.flip(self.rule.accept(p, p, draft.tokens), Lane.ACCEPT)
        tie = p.prob(draft.tokens).clamp_min(torch.finfo(p.probs.dtype).tiny).log()
        path, length, row = longest(draft, passed, tie)
        end = distribution[batch, row]
        left = self.rule.residual(end, end, end.probs.argmax(-1))
        return Verdict(path, length, noise.pick(left.probs, Lane.RESIDUAL))
