"""Tolerance verification: keep drafted states that are close to where the target would go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.draft import Draft, Kind, Scores, Verdict
from mmspec.laws.noise import Noise
from mmspec.verifiers.gaussian_steps import chain, gaussian, plain
from mmspec.verifiers.walk import check

_KINDS = (Kind.RACE, Kind.DET, Kind.IID)


@dataclass(frozen=True)
class ToleranceWindow:
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
    kinds: ClassVar[tuple[Kind, ...]] = _KINDS

    def __post_init__(self) -> None:
        _check(self.tolerance)

    @property
    def lossless(self) -> bool:
        return self.tolerance == 0

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False, law=False)
        if not draft.nodes:
            return plain(draft, scores, noise)
        target = gaussian(scores.law).sample(noise.shared(scores.position))  # (B, N + 1, *E)
        moved = (target[:, :-1] - draft.tokens).cumsum(1)
        scale = scores.features["scale"][:, 1:].flatten(2)[..., 0]  # (B, N), of the next step
        close = moved.square().flatten(2).mean(-1) <= (self.tolerance * scale) ** 2
        return _kept(draft, close, target)


@dataclass(frozen=True)
class MeanTolerance:
    """Keep a drafted state if it misses the target's by little, measured by the target's step.

        |f(x_i) - x_{i+1}| <= tolerance |m(x_i) - x_i|,

    m the target's mean and f its own next state: with the noise of the position in both, the left
    side is the distance of the two means. Every state is judged by its own step, so errors add up.
    Lossy; tolerance 0 is sequential sampling, bit for bit. For samplers with and without noise.

    Raises ValueError for trees and for a negative tolerance.
    """

    tolerance: float
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = _KINDS

    def __post_init__(self) -> None:
        _check(self.tolerance)

    @property
    def lossless(self) -> bool:
        return self.tolerance == 0

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, trees=False, law=False)
        if not draft.nodes:
            return plain(draft, scores, noise)
        law = gaussian(scores.law)
        target = law.sample(noise.shared(scores.position))
        missed = (target[:, :-1] - draft.tokens).flatten(2).norm(dim=-1)
        step = (law.mean - scores.features["state"])[:, :-1].flatten(2).norm(dim=-1)
        return _kept(draft, missed <= self.tolerance * step, target)


def _kept(draft: Draft, close: Tensor, target: Tensor) -> Verdict:  # (B, N), (B, N + 1, *E)
    length = (close & draft.mask).cumprod(-1).sum(-1)
    return chain(draft, length, target[torch.arange(draft.batch, device=length.device), length])


def _check(tolerance: float) -> None:
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance} is below 0; give 0 (sequential) or more")
