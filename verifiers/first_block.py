"""The first block as a cheap check of all others (first-block cache, ParaAttention)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.laws.noise import Noise


@dataclass(frozen=True)
class FirstBlockGate(Verifier):
    """Skip all blocks but the first while its residual changes by at most `threshold`, relatively.

    The change is mean |r - r'| / mean |r'| over the batch, r' that of the last step in full.
    Lossy; a negative threshold skips nothing.
    """

    threshold: float = 0.05
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = ()  # no drafts of tokens

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """Refused: the gate works inside the network, where no token is drafted."""
        raise ValueError(
            "a first-block gate verifies features inside a network, not drafted tokens; use it "
            "with the recipe first-block-cache on a diffusers pipeline"
        )
