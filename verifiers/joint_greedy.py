"""Greedy decoding by a CTC head and a decoder together, over a draft at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.codes.joint import JointScorer
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier, categorical
from mmspec.verifiers.walk import check


@dataclass(frozen=True)
class JointGreedy(Verifier):
    """Keep what a `JointScorer` would have written itself (SMUD, Okabe & Yamamoto 2025).

    The drafter hands the scorer over in `Draft.extras`, at the text committed so far; a draft
    without one is matched against the decoder alone. What comes out is joint greedy decoding,
    whatever was drafted: lossy against the decoder's own, exact where the scorer's weight is 0.

    Raises ValueError for sampling, which the joint score has no distribution for.
    """

    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False)
        distribution, joint = categorical(scores.distribution), draft.extras
        if not distribution.hard:
            raise ValueError(
                "a joint score of CTC head and decoder is decoded greedily; drop temperature and "
                "do_sample"
            )
        each = distribution.scores.float().log_softmax(-1)  # (B, N + 1, V)
        own = distribution.scores.argmax(-1).tolist()
        lengths, following = [], []
        for row, count in enumerate(draft.mask.sum(-1).tolist()):
            drafted, pushed, place = draft.tokens[row, :count].tolist(), 0, 0
            while True:
                if isinstance(joint, JointScorer):
                    token = joint.best(row, each[row, place])
                else:
                    token = own[row][place]
                if place == count or token != drafted[place]:
                    break
                if isinstance(joint, JointScorer):
                    pushed += joint.push(row, token)
                place += 1
            if isinstance(joint, JointScorer):
                joint.pop(row, pushed)
            lengths.append(place)
            following.append(token)
        device = draft.tokens.device
        length = torch.tensor(lengths, device=device)
        index = torch.arange(draft.nodes, device=device)
        path = torch.where(index < length[:, None], index, -1)
        return Verdict(path, length, torch.tensor(following, device=device))
