"""Coupled sampling: accept the token that the target samples with the noise of the position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.distributions import Distribution
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import row_column
from mmspec.verifiers.walk import check_draft, draft_depth, verify_tokens


@dataclass(frozen=True)
class Coupled(Verifier):
    """Accept tokens equal to the target's (Gumbel-max coupling; Daliri et al. 2025).

    The target's token after a node is a function of (seed, row, position) and its distribution, so
    the output is that of plain decoding with the same seed, token for token, for any draft:
    lossless for every kind, every tree, categorical and continuous tokens. Point masses use no
    noise: greedy decoding. RACE proposals use the same noise and agree with probability sum_x 1 /
    sum_z max(p_z/p_x, q_z/q_x). Of duplicate siblings the one with the longest accepted path is
    taken.
    """

    lossless: ClassVar[bool] = True
    couples: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET, Kind.IID, Kind.WOR, Kind.HUB)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, distribution=False)
        return verify_tokens(draft, target_tokens(draft, scores, noise))


def target_tokens(draft: Draft, scores: Scores, noise: Noise) -> Tensor:  # (B, N + 1, *E)
    """The target's token after the context and after every node."""
    distribution: Distribution = scores.distribution
    if isinstance(distribution, Categorical):
        if distribution.hard:
            return distribution.scores.argmax(-1)
        if scores.lengths is not None and draft.node_inputs is None:  # noise per depth, not node
            count = draft_depth(draft) + 1
            gumbel = noise.position_gumbel(scores.lengths, count, distribution.size)
            return (distribution.scores + _spread_levels(draft, gumbel)).argmax(-1)
    return distribution.sample(noise.shared_keys(scores.position))


def _spread_levels(draft: Draft, gumbel: Tensor) -> Tensor:  # (B, D + 1, V) -> (B, N + 1, V)
    """The noise of the level of each row of `scores`."""
    if draft.is_chain:
        return gumbel
    if draft.tree is not None:
        return gumbel[:, draft.tree.scored_depths_on(gumbel.device)[0]]
    return gumbel[row_column(draft.batch, gumbel.device), draft.scored_depths]
