"""No check at all: what was drafted is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier, categorical
from mmspec.verifiers.distances import excess
from mmspec.verifiers.walk import check, proposals


@dataclass(frozen=True)
class Unchecked(Verifier):
    """Keep every proposal of a chain, and the target's token behind the last one.

    Lossy; for decoding that is parallel but not speculative (ZipAR). The tokens come out with the
    distribution they were drafted from, so the over-accepted mass that is reported is TV(p, q); a
    draft without distributions counts as point masses, which gives 1 - p, an upper bound. The
    target's own token is drawn with the noise of its position: without any draft this is plain
    decoding with the same seed.
    """

    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET, Kind.IID, Kind.WOR, Kind.HUB)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False, distribution=False)
        distribution, index = (
            categorical(scores.distribution),
            torch.arange(draft.nodes, device=draft.tokens.device),
        )
        taken = draft.mask.cumprod(-1)
        length = taken.sum(-1)
        row = length[:, None]
        rows = torch.arange(draft.batch, device=row.device)[:, None]
        own = distribution[rows, row].sample(noise.shared(scores.position.gather(1, row)))
        path = taken * (index + 1) - 1
        over = distribution.scores.new_zeros(draft.batch)
        if draft.nodes:
            p = distribution.probs[:, :-1]
            q = proposals(draft, p).probs
            found = excess(p, q, draft.tokens, torch.ones_like(p[..., 0]))
            over = (found * taken).sum(-1)
        return Verdict(path, length, own[:, 0], over)
