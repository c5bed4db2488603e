"""Gaussian steps of different standard deviations keep the target's distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from mmspec.distributions.gaussian import Gaussian
from mmspec.distributions.noise import KeyedNoise, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.gaussian_ratio import GaussianRatio
from tests.verifiers.gaussian_rounds import (
    BENT,
    apart,
    check_acceptance,
    check_distribution,
    check_joint,
    check_normal,
    make_draft,
    play,
)


def shared_mass(r: float, p: float, q: float) -> float:
    """The integral of min(N(0, p^2), N(-r, q^2)), r in the unit of both, by a sum."""
    grid = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    distribution = [
        (-0.5 * ((grid - at) / std) ** 2).exp() / std / math.sqrt(2 * math.pi)
        for at, std in ((0.0, p), (-r, q))
    ]
    return float(torch.minimum(*distribution).sum() * (grid[1] - grid[0]))


@pytest.mark.parametrize(
    ("r", "draft_std"), [(0.0, 0.5), (0.0, 1.0), (1.0, 0.5), (1.0, 0.7), (1.0, 1.0), (2.5, 0.9)]
)
def test_one_number_is_accepted_as_often_as_distributions_overlap(
    r: float, draft_std: float
) -> None:
    played = play(GaussianRatio(), replace(apart(r, 1), draft_std=draft_std), 20_000)
    check_normal(played.increments[:, 0, 0], "first")
    check_joint(played)
    check_acceptance(played, shared_mass(0.7 * r, 0.7, draft_std))


@pytest.mark.parametrize("draft_std", [0.6, 0.8])
def test_events_of_several_numbers_keep_the_target_distribution(draft_std: float) -> None:
    case = replace(apart(1.0, 6), draft_std=draft_std)
    check_distribution(play(GaussianRatio(), case, 20_000), case)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_chain_is_exact_jointly(ragged: bool) -> None:
    check_joint(play(GaussianRatio(), replace(BENT, draft_std=0.9, ragged=ragged), 60_000))


def test_equal_distributions_are_accepted_and_the_plain_state_follows() -> None:
    noise = KeyedNoise(torch.arange(50))
    draft, scores = make_draft(apart(0.0, 3), noise, 50)
    verdict = GaussianRatio().verify(draft, scores, noise)
    assert verdict.length.tolist() == [1] * 50
    assert verdict.next is not None
    assert verdict.next.equal(scores.distribution.sample(noise.shared_keys(scores.position))[:, 1])


@dataclass(frozen=True)
class NoDeterminant(Verifier):
    """Wrong: exponents alone are compared, not densities."""

    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = GaussianRatio.kinds

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        class Exponent(Gaussian):
            def log_prob(self, x: torch.Tensor) -> torch.Tensor:
                return super().log_prob(x) + self.std.expand_as(self.mean).log().sum(-1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mmspec.verifiers.gaussian_ratio.Gaussian", Exponent)
            return GaussianRatio().verify(draft, scores, noise)


def test_densities_without_their_determinants_are_found() -> None:
    case = replace(apart(1.0, 1), draft_std=1.0)
    with pytest.raises(AssertionError, match="along"):
        check_distribution(play(NoDeterminant(), case, 20_000), case)


def test_too_many_tries_are_an_error() -> None:
    noise = KeyedNoise(torch.arange(20_000))
    draft, scores = make_draft(apart(0.05, 1), noise, 20_000)
    with pytest.raises(ValueError, match="nearly"):
        GaussianRatio(max_trials=3).verify(draft, scores, noise)
    with pytest.raises(ValueError, match="at least 1"):
        GaussianRatio(max_trials=0)


def test_steps_without_noise_and_missing_noise_are_refused() -> None:
    noise = KeyedNoise(torch.arange(4))
    draft, scores = make_draft(replace(apart(1.0, 2), draft_std=0.0), noise, 4)
    with pytest.raises(ValueError, match="standard deviation 0"):
        GaussianRatio().verify(draft, scores, noise)
    with pytest.raises(ValueError, match=r"set Draft\.extras"):
        GaussianRatio().verify(replace(draft, extras=None), scores, noise)
