"""Tolerance verification: accept drafted states close to the target's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.gaussian_steps import accept_chain, as_gaussian, verify_empty
from mmspec.verifiers.walk import check_draft


@dataclass(frozen=True)
class ToleranceWindow(Verifier):
    """Accept states until a Picard sweep would still move one (ParaDiGMS, Shih et al. 2023).

    With f(x_i) the target's next state (its mean and the noise of the position), one sweep moves
    state j by the sum of f(x_i) - x_{i+1} over i < j. States are accepted while

        |sum|^2 / d <= tolerance^2 sigma_j^2,

    d numbers per state, sigma_j the std of the ancestral step that leaves state j (defined for a
    deterministic sampler too), as in the authors' code. Then comes f of the last accepted state.
    Lossy; tolerance 0 accepts only what equals f and is sequential sampling, bit for bit. Drafts
    must use the noise of the position (Kind.RACE).

    The authors commit the states after the sweep; this verifier accepts the drafted states that it
    hardly moves, one sweep behind, because a verdict accepts drafted states, and with tolerance 0
    these are the sequential chain. `tests/recipes/test_paradigms.py` also tests the authors'
    version.

    Raises ValueError for trees and for a negative tolerance.
    """

    tolerance: float = 0.1
    uses_trees: ClassVar[bool] = False
    decodes: ClassVar[tuple[str, ...]] = ("latents", "patches")
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET, Kind.IID)

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance={self.tolerance} is below 0; give 0 (sequential) or more")

    @property
    def lossless(self) -> bool:
        return self.tolerance == 0

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False, distribution=False)
        if not draft.nodes:
            return verify_empty(draft, scores, noise)
        target = as_gaussian(scores.distribution).sample(
            noise.shared_keys(scores.position)
        )  # (B, N + 1, *E)
        moved = (target[:, :-1] - draft.tokens).cumsum(1)
        scale = scores.features["scale"][:, 1:].flatten(2)[..., 0]  # (B, N), of the next step
        close = moved.square().flatten(2).mean(-1) <= (self.tolerance * scale) ** 2
        length = (close & draft.mask).cumprod(-1).sum(-1)
        rows = torch.arange(draft.batch, device=length.device)
        return accept_chain(draft, length, target[rows, length])
