"""Path ratio: images have the target's distribution, acceptance is 1 - TV of the paths.

A correct verifier raises a false alarm once in 10 000 seeds, which are fixed; wrong variants must
fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from mmspec.bench.gaussian_tests import standard_normal_p_values, uniform_p_value
from mmspec.distributions.gaussian import Gaussian
from mmspec.distributions.noise import KeyedNoise, Keys, Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.drafters.denoising.patches import Ahead, AlignedDrafter
from mmspec.drafters.plain import NoDraft
from mmspec.modalities.mar.tiny_models import (
    LinearHead,
    LinearReader,
    innovations,
)
from mmspec.targets.continuous.paths import PathDistribution, PathResidual
from mmspec.verifiers.path_ratio import PathRatio, as_path_distribution
from tests.verifiers.toy_images import ALARM, ROWS, generate_images

TARGET = LinearReader(LinearHead.of((0.5, 0.4, 0.3), slope=0.3))
DRAFTS = {
    "mean": LinearReader(TARGET.head, bias=0.5, weight=0.2),
    "std": LinearReader(LinearHead.of((0.5, 0.4, 0.3), slope=0.3, spread=(1.3, 0.8, 1.2))),
    "both": LinearReader(LinearHead.of((0.5, 0.4, 0.3), slope=0.0, spread=(0.8, 1.1, 0.9)), 0.3),
    "far": LinearReader(TARGET.head, bias=4.0),
}


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("both", 1),
        *(pytest.param("mean", at, marks=pytest.mark.exhaustive) for at in (2, 3)),
        pytest.param("std", 3, marks=pytest.mark.exhaustive),
        ("both", 3),
        ("far", 3),
    ],
)
def test_images_have_the_distribution_of_the_target(name: str, length: int) -> None:
    drafter = AlignedDrafter(DRAFTS[name], Ahead(length))
    found = generate_images(TARGET, drafter, PathRatio(), seed=length)
    assert min(standard_normal_p_values(innovations(TARGET, found))) > ALARM
    assert any(sum(kept.accepted) for kept in found.rounds) or name == "far"
    assert any(sum(kept.drafted) > sum(kept.accepted) for kept in found.rounds)


def test_the_alarm_is_raised_by_the_drafts_own_distribution() -> None:
    found = generate_images(DRAFTS["mean"], NoDraft(), PathRatio())
    assert min(standard_normal_p_values(innovations(TARGET, found))) < ALARM


def test_the_alarm_is_raised_by_corrections_that_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PathResidual, "sample", lambda self, keys: self.p.sample(keys))
    found = generate_images(TARGET, AlignedDrafter(DRAFTS["mean"], Ahead(3)), PathRatio())
    assert min(standard_normal_p_values(innovations(TARGET, found))) < ALARM


def end_only(self: PathDistribution, x: Tensor) -> Tensor:
    """Wrong: the density of the last state alone."""
    distribution = self.step_distributions(x)
    last = Gaussian(distribution.mean[..., -1, :], distribution.std[..., -1, :], 1)
    return torch.where(self.real, last.log_prob(x[..., -1, :]), 0)


def test_the_alarm_is_raised_by_the_density_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PathDistribution, "log_prob", end_only)
    found = generate_images(TARGET, AlignedDrafter(DRAFTS["mean"], Ahead(3)), PathRatio())
    assert min(standard_normal_p_values(innovations(TARGET, found))) < ALARM


@dataclass(frozen=True)
class Uncut(Verifier):
    """Wrong: every cell is tested exactly, but cells that depend on a rejected one stay."""

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)
    lossless: ClassVar[bool] = True

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return PathRatio().verify(draft, scores, noise)
        p, q = (
            as_path_distribution(scores.distribution)[:, :-1],
            as_path_distribution(draft.distribution),
        )
        ratio = p.log_prob(draft.tokens) - q.log_prob(draft.tokens)
        refused = ~noise.flip(ratio.clamp_max(0).exp(), Lane.ACCEPT)
        index = torch.arange(refused[0].numel())
        keys = Keys(noise.fresh_keys(Lane.RESIDUAL, index).key.view_as(ratio.long())[refused])
        replaced = draft.tokens.clone()
        replaced[refused] = PathResidual(p[refused], q[refused]).sample(keys)
        path = torch.where(draft.mask, torch.arange(draft.nodes), -1)
        return Verdict(path, draft.mask.sum(-1), None, replacements=replaced)


def test_the_alarm_is_raised_by_steps_that_read_a_refused_cell() -> None:
    drafter = AlignedDrafter(LinearReader(TARGET.head, bias=1.5), Ahead(3))
    found = generate_images(TARGET, drafter, Uncut())
    assert min(standard_normal_p_values(innovations(TARGET, found))) < ALARM


def test_acceptance_is_one_minus_the_distance_of_the_paths() -> None:
    """Drifts that do not depend on the state: r^2 is the sum of r_t^2, as for one Gaussian."""
    std, shift = (0.5, 0.4, 0.3), 0.7
    target = LinearReader(LinearHead.of(std), weight=0.0)
    drafter = AlignedDrafter(replace(target, bias=shift), Ahead(1))
    rounds = generate_images(target, drafter, PathRatio()).rounds
    r = math.sqrt(sum((0.5 * shift / s) ** 2 for s in std))
    expected = math.erfc(r / math.sqrt(8))  # 2 Phi(-r / 2)
    accepted = sum(rounds[0].accepted) / ROWS
    assert abs(accepted - expected) < 4 * math.sqrt(expected * (1 - expected) / ROWS)


def test_a_copy_is_accepted_whole_and_equals_plain_sampling() -> None:
    plain = generate_images(TARGET, NoDraft(), PathRatio(), seed=5)
    assert len(plain.rounds) == 3
    copied = generate_images(TARGET, AlignedDrafter(TARGET, Ahead(3)), PathRatio(), seed=5)
    assert len(copied.rounds) == 1
    assert torch.equal(plain.latents, copied.latents)


def distribution(bias: float, head: LinearHead, count: int) -> PathDistribution:
    condition = torch.full((count, 1, 1), bias)
    return PathDistribution(head, condition, torch.ones(count), torch.ones(count, dtype=torch.bool))


def test_residual_paths_have_their_distribution() -> None:
    """One step from a fixed distribution, where the residual has a closed form; alarm 1e-4.

    Given x0 the distributions of x1 are N(x0/2, 1/4) and N(x0/2 + 1/2, 1/4), which cross at x0/2 +
    1/4: the excess lies left of that, and its mass 2 Phi(1/2) - 1 is the same for every x0.
    """
    head = LinearHead.of((0.5,))
    noise = KeyedNoise.from_seed(0, 1, torch.device("cpu"))
    keys = Keys(noise.shared_keys(torch.arange(4000)[None]).key[0])
    paths = PathResidual(distribution(0.0, head, 4000), distribution(1.0, head, 4000)).sample(keys)
    x0, x1 = paths[:, 0, 0].double(), paths[:, 1, 0].double()
    assert uniform_p_value(torch.special.ndtr(x0)) > 1e-4
    u = 2 * (x1 - x0 / 2)  # N(0, 1) under p, N(1, 1) under q
    assert (u <= 0.5 + 1e-5).all()
    levels = (torch.special.ndtr(u) - torch.special.ndtr(u - 1)) / math.erf(1 / math.sqrt(8))
    assert uniform_p_value(levels) > 1e-4


def test_the_residual_of_equal_distributions_does_not_exist() -> None:
    head = LinearHead.of((0.5,))
    keys = Keys(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="equal up to rounding"):
        PathResidual(distribution(0.0, head, 2), distribution(0.0, head, 2), max_trials=8).sample(
            keys
        )


def normal(x: float, mean: float, std: float) -> float:
    """A log density."""
    return -(((x - mean) / std) ** 2) / 2 - math.log(std * math.sqrt(2 * math.pi))


def test_log_densities_are_products_over_the_path() -> None:
    head = LinearHead.of((0.5, 0.4), slope=0.3, spread=(1.1, 0.7))
    paths = torch.randn(3, 3, 1, generator=torch.Generator().manual_seed(0))
    found = distribution(0.4, head, 3).log_prob(paths)
    for row, path in enumerate(paths[..., 0].double().tolist()):
        expected = normal(path[0], 0.0, 1.0)
        for index, std in enumerate((0.5 * 1.1, 0.4 * 0.7)):
            mean = 0.5 * path[index] + 0.5 * (0.4 + 0.3 * path[index])
            expected += normal(path[index + 1], mean, std)
        assert found[row].item() == pytest.approx(expected, abs=1e-5)


def test_silent_steps_have_no_density() -> None:
    head = LinearHead.of((0.5, 0.0))
    with pytest.raises(ValueError, match=r"no noise in step 1 of 2.*last_noise=True"):
        distribution(0.0, head, 2).log_prob(torch.zeros(2, 3, 1))
