"""Tolerance verification: keep drafted states that are close to where the target would go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.gaussian_steps import chain, gaussian, plain
from mmspec.verifiers.walk import check


@dataclass(frozen=True)
class ToleranceWindow(Verifier):
    """Keep a window up to where a Picard sweep would still move it (ParaDiGMS, Shih et al. 2023).

    With f(x_i) the target's own next state (its mean and the noise of the position), one sweep
    moves state j by the sum of f(x_i) - x_{i+1} over i < j. States are kept while

        |sum|^2 / d <= tolerance^2 sigma_j^2,

    d numbers per state, sigma_j the std of the ancestral step that leaves state j (a deterministic
    sampler has a scale too), as in the authors' code. Then comes f of the last state kept. Lossy;
    tolerance 0 keeps only what equals f and is sequential sampling, bit for bit. Drafts must use
    the noise of the position (Kind.RACE).

    The authors commit the states that a sweep has moved to; here the states are kept that it hardly
    moves, one sweep behind, because a verdict keeps drafted states, and what was kept under
    tolerance 0 is then the sequential chain. `tests/recipes/test_paradigms.py` has theirs as well.

    Raises ValueError for trees and for a negative tolerance.
    """

    tolerance: float = 0.1
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET, Kind.IID)

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance={self.tolerance} is below 0; give 0 (sequential) or more")

    @property
    def lossless(self) -> bool:
        return self.tolerance == 0

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False, distribution=False)
        if not draft.nodes:
            return plain(draft, scores, noise)
        target = gaussian(scores.distribution).sample(
            noise.shared(scores.position)
        )  # (B, N + 1, *E)
        moved = (target[:, :-1] - draft.tokens).cumsum(1)
        scale = scores.features["scale"][:, 1:].flatten(2)[..., 0]  # (B, N), of the next step
        close = moved.square().flatten(2).mean(-1) <= (self.tolerance * scale) ** 2
        length = (close & draft.mask).cumprod(-1).sum(-1)
        rows = torch.arange(draft.batch, device=length.device)
        return chain(draft, length, target[rows, length])
