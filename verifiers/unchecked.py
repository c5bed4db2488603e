"""No verification: every drafted token is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.distances import excess
from mmspec.verifiers.walk import check_draft, proposals


@dataclass(frozen=True)
class Unchecked(Verifier):
    """Accept every proposal of a chain, and add the target's token after the last one.

    Lossy; for decoding that is parallel but not speculative (ZipAR). The tokens have the
    distribution they were drafted from, so the reported over-accepted mass is TV(p, q); a draft
    without distributions counts as point masses, which gives 1 - p, an upper bound. The target's
    token is sampled with the noise of its position: without a draft this is plain decoding with the
    same seed.
    """

    lossless: ClassVar[bool] = False
    uses_trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET, Kind.IID, Kind.WOR, Kind.HUB)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False, distribution=False)
        distribution, index = (
            as_categorical(scores.distribution),
            torch.arange(draft.nodes, device=draft.tokens.device),
        )
        taken = draft.mask.cumprod(-1)
        length = taken.sum(-1)
        row = length[:, None]
        rows = torch.arange(draft.batch, device=row.device)[:, None]
        own = distribution[rows, row].sample(noise.shared_keys(scores.position.gather(1, row)))
        path = taken * (index + 1) - 1
        over = distribution.scores.new_zeros(draft.batch)
        if draft.nodes:
            p = distribution.probs[:, :-1]
            q = proposals(draft, p).probs
            found = excess(p, q, draft.tokens, torch.ones_like(p[..., 0]))
            over = (found * taken).sum(-1)
        return Verdict(path, length, own[:, 0], over)
