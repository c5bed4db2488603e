"""Test the cells of a block independently; only cells around rejected ones are generated again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.codes.connected_cells import Cells, dilate
from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Rule, Scores, Verdict, Verifier
from mmspec.verifiers.distances import excess
from mmspec.verifiers.walk import check_draft, one_hot


@dataclass(frozen=True)
class LocalIslands(Verifier):
    """Test every cell with `rule` independently, and reject those within `reach` of a rejected one.

    MuLo-SD (Peruzzo et al. 2026). `Cells` (`Draft.extras`) has the grid positions of the nodes to
    be tested; the others were tested or sampled before and are accepted. The prefix before the
    first rejected cell is committed, followed by the target's token there, sampled with the noise
    of its position. `Verdict.failed` tells the drafter which other nodes to discard. Lossy: cells
    are accepted regardless of those before them. The over-accepted mass of every committed token is
    reported: a total variation if the draft has its distribution, else 1 - p for a point mass.
    """

    rule: Rule
    reach: float = 1
    lossless: ClassVar[bool] = False
    uses_trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET)

    def __post_init__(self) -> None:
        if not self.reach >= 0:
            raise ValueError(
                f"reach={self.reach} is not a distance; give 0 for rejected cells alone, or more"
            )

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False, distribution=False)
        distribution = as_categorical(scores.distribution)
        failed, over = self._test_cells(draft, distribution.evaluate()[:, :-1], noise)
        taken = (draft.mask & ~failed).cumprod(-1)
        length = taken.sum(-1)
        row = length[:, None]
        rows = torch.arange(draft.batch, device=row.device)[:, None]
        own = distribution[rows, row].sample(noise.shared_keys(scores.position.gather(1, row)))
        path = taken * (torch.arange(draft.nodes, device=row.device) + 1) - 1
        return Verdict(path, length, own[:, 0], (over * taken).sum(-1), resample_mask=failed)

    def _test_cells(
        self, draft: Draft, p: Categorical, noise: Noise
    ) -> tuple[Tensor, Tensor]:  # (B, N) x2
        """The nodes to be generated again, and the over-accepted mass of accepting each node."""
        if not draft.nodes:
            return draft.mask, torch.zeros_like(p.probs[..., 0])
        if not isinstance(draft.extras, Cells):
            raise ValueError(
                "LocalIslands needs the grid positions of the drafted cells; use it with a drafter "
                "that sets Draft.extras to Cells, as recipe 'mulo-sd' does"
            )
        if draft.distribution is None:
            q = Categorical.from_probs(one_hot(draft.tokens, p.probs))
        else:
            q = as_categorical(draft.distribution).evaluate(p.probs)
        passes = noise.flip(self.rule.accept(p, q, draft.tokens), Lane.ACCEPT)
        failed = dilate(draft.extras.positions, ~passes & draft.mask, self.reach)
        sure = torch.ones_like(p.probs[..., 0])
        return failed, excess(p.probs, q.probs, draft.tokens, sure)
