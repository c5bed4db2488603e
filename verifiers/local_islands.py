"""Judge the cells of a block one by one; only the surroundings of refused ones are drawn anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.codes.connected_cells import Cells, around
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Rule, Scores, Verdict, Verifier, categorical
from mmspec.verifiers.distances import excess
from mmspec.verifiers.walk import check, one_hot


@dataclass(frozen=True)
class LocalIslands(Verifier):
    """Ask `rule` about every cell by itself, and refuse those within `reach` of a refused one.

    MuLo-SD (Peruzzo et al. 2026). `Cells` say which nodes are to be judged and where they
    stand; others are kept unasked, as they were judged or drawn before. What comes before the first
    refused cell is committed, with the target's token there, drawn with the noise of its position.
    `Verdict.failed` tells the drafter what else it may not keep. Lossy: cells are accepted whatever
    became of those before them. Of every committed token the over-accepted mass is reported: a
    total variation where the draft has its distribution, and else 1 - p, because it came from a
    point mass.
    """

    rule: Rule
    reach: float = 1
    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET)

    def __post_init__(self) -> None:
        if not self.reach >= 0:
            raise ValueError(
                f"reach={self.reach} is no distance; give 0 for refused cells alone, or more"
            )

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False, distribution=False)
        distribution = categorical(scores.distribution)
        failed, over = self._judged(draft, distribution.evaluated()[:, :-1], noise)
        taken = (draft.mask & ~failed).cumprod(-1)
        length = taken.sum(-1)
        row = length[:, None]
        rows = torch.arange(draft.batch, device=row.device)[:, None]
        own = distribution[rows, row].sample(noise.shared(scores.position.gather(1, row)))
        path = taken * (torch.arange(draft.nodes, device=row.device) + 1) - 1
        return Verdict(path, length, own[:, 0], (over * taken).sum(-1), failed=failed)

    def _judged(
        self, draft: Draft, p: Categorical, noise: Noise
    ) -> tuple[Tensor, Tensor]:  # (B, N) x2
        """What is to be drawn anew, and what keeping a node would over-accept."""
        if not draft.nodes:
            return draft.mask, torch.zeros_like(p.probs[..., 0])
        if not isinstance(draft.extras, Cells):
            raise ValueError(
                "LocalIslands judges cells by where they stand, but the draft does not say; use it "
                "with a drafter that sets Draft.extras to Cells, as recipe 'mulo-sd' has it"
            )
        if draft.distribution is None:
            q = Categorical.having(one_hot(draft.tokens, p.probs))
        else:
            q = categorical(draft.distribution).evaluated(p.probs)
        passes = noise.flip(self.rule.accept(p, q, draft.tokens), Lane.ACCEPT)
        failed = around(draft.extras.places, ~passes & draft.mask, self.reach)
        sure = torch.ones_like(p.probs[..., 0])
        return failed, excess(p.probs, q.probs, draft.tokens, sure)
