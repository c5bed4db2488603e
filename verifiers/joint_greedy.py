"""Joint greedy decoding with a CTC head and a decoder, over a whole draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.codes.ctc import JointScorer
from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.walk import check_draft


@dataclass(frozen=True)
class JointGreedy(Verifier):
    """Accept the tokens that a `JointScorer` would generate (SMUD, Okabe & Yamamoto 2025).

    The drafter passes the scorer in `Draft.extras`, with the committed text pushed; a draft without
    one is matched against the decoder alone. The output is joint greedy decoding for any draft:
    lossy with respect to the decoder, exact if the scorer's weight is 0.

    Raises ValueError for sampling, because the joint score defines no distribution.
    """

    lossless: ClassVar[bool] = False
    uses_trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False)
        distribution, joint = as_categorical(scores.distribution), draft.extras
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
