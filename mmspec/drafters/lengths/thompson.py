"""Draft lengths by Thompson sampling: another token as long as acceptance looks likely."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from mmspec.draft import Round
from mmspec.drafters.lengths.length import Length, acceptance_counts, max_useful_length
from mmspec.targets.tokens.context import Context


@dataclass
class Posterior:
    """The Beta distribution of a token's acceptance, and what samples from it."""

    accepted: float
    refused: float
    noise: Random

    def looks_likely(self) -> bool:
        """Whether a sampled acceptance is above one half."""
        return self.noise.betavariate(self.accepted, self.refused) > 0.5


@dataclass(frozen=True)
class Thompson(Length):
    """One more token while an acceptance sampled from its posterior is above 1/2 (EESD, 2024).

    The posterior is Beta(accepted, refused) of the tokens tested in this request; the prior is one
    of each. At least one token is drafted, so that there is something to learn from. Lengths are
    known before a round draws any token, so the output stays exact. Reconstructed: the threshold.
    """

    max_length: int = 10
    seed: int = 0

    def begin(self) -> Posterior:
        return Posterior(1.0, 1.0, Random(self.seed))

    def budget(self, state: Posterior, context: Context) -> int:
        limit = min(self.max_length, max_useful_length(context))
        count = min(1, limit)
        while count < limit and state.looks_likely():
            count += 1
        return count

    def observe(self, state: Posterior, round_: Round) -> Posterior:
        for accepted, num_tested in acceptance_counts(round_):
            state.accepted += accepted
            state.refused += accepted < num_tested
        return state
