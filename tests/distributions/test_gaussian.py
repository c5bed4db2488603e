"""Gaussians: densities, samples with keyed noise, and residuals."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.gaussian import Gaussian, GaussianResidual
from tests.distributions.test_categorical import COUNT, keys, p_value


def test_a_gaussian_has_its_density_and_draws() -> None:
    mean = torch.tensor([[0.5, -1.0], [2.0, 0.0]])
    distribution = Gaussian(mean, torch.tensor([0.5, 2.0]), events=1)
    assert distribution.batch == (2,)
    x = torch.tensor([[0.0, 0.0], [2.0, 1.0]])
    reference = torch.distributions.Normal(mean, torch.tensor([0.5, 2.0]).expand_as(mean))
    assert_close(distribution.log_prob(x), reference.log_prob(x).sum(-1))
    assert distribution[1].batch == ()
    assert_close(distribution[1].log_prob(x[1]), distribution.log_prob(x)[1])
    many = Gaussian(mean[:1].expand(COUNT, -1), torch.tensor([0.5, 2.0]), events=1)
    drawn = many.sample(keys())  # standard errors: 0.01 and 0.007 at most
    assert_close(drawn.mean(0), mean[0], atol=0.05, rtol=0)
    assert_close(drawn.std(0), torch.tensor([0.5, 2.0]), atol=0.035, rtol=0)


def test_the_same_keys_move_two_gaussians_together() -> None:
    left = Gaussian(torch.zeros(9, 3), torch.ones(()), events=1)
    right = Gaussian(torch.full((9, 3), 0.25), torch.ones(()), events=1)
    moved = right.sample(keys(9)) - left.sample(keys(9))
    assert_close(moved, torch.full((9, 3), 0.25))


def test_a_gaussian_without_spread_is_its_mean() -> None:
    distribution = Gaussian(torch.randn(4, 2, 3), torch.zeros(()), events=2)
    assert distribution.batch == (4,)
    assert torch.equal(distribution.sample(keys(4)), distribution.mean)


PAIRS = [((0.0, 1.0), (1.0, 1.0)), ((0.0, 1.0), (0.5, 2.0)), ((1.0, 1.5), (0.0, 0.7))]


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_a_gaussian_residual_follows_its_density(
    p: tuple[float, float], q: tuple[float, float]
) -> None:
    """One dimension against the integrated density: chi-square, one false alarm in a million."""
    distributions = [
        Gaussian(torch.full((COUNT, 1), mean), torch.tensor(std), events=1) for mean, std in (p, q)
    ]
    distribution = distributions[0].residual(distributions[1])
    assert isinstance(distribution, GaussianResidual)
    assert distribution.batch == (COUNT,)
    drawn = distribution.sample(keys(seed=3))[:, 0].double()
    edges = torch.linspace(-8, 8, 16_001, dtype=torch.float64)
    middle = (edges[1:] + edges[:-1]) / 2
    dense = [torch.distributions.Normal(*pair).log_prob(middle).exp() for pair in (p, q)]
    mass = (dense[0] - dense[1]).clamp_min(0)
    expected = (mass / mass.sum()).view(-1, 500).sum(-1) * COUNT
    counts = torch.histc(drawn, 32, -8, 8)
    usual = expected >= 5
    assert float(counts[~usual].sum()) <= float(expected[~usual].sum()) + 12
    assert p_value(counts[usual], expected[usual]) > 1e-6


def test_rejection_with_gaussian_residuals_gives_p_back() -> None:
    """Draw from q, accept with min(1, p/q), else the residual: the mixture is p again."""
    p = Gaussian(torch.zeros(COUNT, 1), torch.tensor(1.0), events=1)
    q = Gaussian(torch.full((COUNT, 1), 0.8), torch.tensor(1.3), events=1)
    base = keys(seed=5)
    x = q.sample(base)
    accepted = base.split(99).uniform() < (p.log_prob(x) - q.log_prob(x)).exp()
    final = torch.where(accepted[:, None], x, p.residual(q).sample(base.split(7)))
    uniforms = torch.special.ndtr(final[:, 0].double())
    counts = torch.histc(uniforms, 20, 0, 1)
    assert p_value(counts, torch.full_like(counts, COUNT / 20)) > 1e-6


def test_the_residual_of_equal_gaussians_does_not_exist() -> None:
    distribution = Gaussian(torch.zeros(2, 1), torch.tensor(1.0), events=1)
    with pytest.raises(ValueError, match="equal Gaussians does not exist; accept instead"):
        GaussianResidual(distribution, distribution, max_trials=20).sample(keys(2))


def test_rules_over_a_vocabulary_refuse_other_distributions() -> None:
    with pytest.raises(
        TypeError, match="a Categorical is needed here, but the distribution is a Gaussian"
    ):
        as_categorical(Gaussian(torch.zeros(1, 1), torch.tensor(1.0), events=1))
    with pytest.raises(TypeError, match="NoneType"):
        as_categorical(None)
