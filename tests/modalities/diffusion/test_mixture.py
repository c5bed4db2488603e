"""Mixtures: the optimal denoiser has a closed form, checked by Tweedie's formula and by samples."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmspec.distributions.kernels import GaussianKernel
from mmspec.modalities.diffusion.mixture import Mixture, mixture, vp_grid

LEVELS = [(1.0, 0.1), (0.8, 0.6), (0.3, 0.95)]


@pytest.mark.parametrize(("alpha", "sigma"), LEVELS)
def test_the_posterior_mean_follows_from_the_score(alpha: float, sigma: float) -> None:
    """Tweedie: E[x0 | x] = (x + sigma^2 grad log p(x)) / alpha."""
    data = mixture(3, 4, seed=0)
    x = torch.randn(16, 3, dtype=torch.float64, requires_grad=True)
    (score,) = torch.autograd.grad(data.log_density(x, alpha, sigma).sum(), x)
    levels = (torch.full((16,), level, dtype=torch.float64) for level in (alpha, sigma))
    assert_close(data.clean(x, *levels), (x + sigma**2 * score) / alpha, atol=1e-9, rtol=1e-9)


def test_one_narrow_component_is_always_predicted() -> None:
    mean = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    data = Mixture(mean, torch.tensor([1e-6]).double(), torch.ones(1).double())
    kernel = GaussianKernel.ancestral(*vp_grid(8))
    states = torch.randn(5, 2)
    found = data.denoiser(kernel).predict(states, torch.arange(5), torch.zeros(5).long()).clean
    assert_close(found, mean.float().expand(5, -1), atol=1e-4, rtol=0)


def test_states_keep_their_shape_and_type() -> None:
    kernel = GaussianKernel.ancestral(*vp_grid(4))
    states = torch.randn(3, 2, 1, 2)
    found = (
        mixture(4, 2, 0).denoiser(kernel).predict(states, torch.tensor([0, 1, 3]), torch.arange(3))
    )
    assert (found.clean.shape, found.clean.dtype) == (states.shape, torch.float32)


def test_the_density_is_normalised_in_one_dimension() -> None:
    data = mixture(1, 3, seed=1)
    grid = torch.linspace(-12, 12, 20_001, dtype=torch.float64)[:, None]
    for alpha, sigma in LEVELS:
        mass = torch.trapezoid(data.log_density(grid, alpha, sigma).exp(), grid[:, 0])
        assert float(mass) == pytest.approx(1, abs=1e-6)


def test_samples_have_the_mean_and_the_components_of_the_data() -> None:
    data = mixture(2, 3, seed=2, std=0.05)
    x, count = data.sample(20_000, seed=3), 20_000
    mean = (data.weights[:, None] * data.means).sum(0)
    assert_close(x.double().mean(0), mean, atol=6 * float(x.std()) / count**0.5, rtol=0)
    share = data.component(x).bincount(minlength=3) / count
    assert_close(share.double(), data.weights, atol=0.03, rtol=0)
    assert torch.equal(data.sample(10, seed=3), data.sample(10, seed=3))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 10, 50])
def test_grids_preserve_variance_and_end_at_the_data(schedule: str, steps: int) -> None:
    alpha, sigma = vp_grid(steps, schedule)  # type: ignore[arg-type]
    assert len(alpha) == len(sigma) == steps + 1
    assert_close(alpha**2 + sigma**2, torch.ones(steps + 1).double())
    assert bool((alpha.diff() > 0).all())
    assert (float(alpha[-1]), float(sigma[-1])) == (1, 0)
