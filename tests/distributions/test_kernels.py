"""Gaussian kernels: one table for many samplers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmspec.distributions.kernels import GaussianKernel, at_step

STEPS = 12


def _preserving(clean_end: bool = True) -> tuple[Tensor, Tensor]:
    """alpha and sigma of a cosine grid."""
    angle = torch.linspace(1.5, 0.0 if clean_end else 0.02, STEPS + 1, dtype=torch.float64)
    return angle.cos(), angle.sin()


def _flow() -> tuple[Tensor, Tensor]:
    t = torch.linspace(0.98, 0, STEPS + 1, dtype=torch.float64)
    return 1 - t, t


def _exploding() -> tuple[Tensor, Tensor]:
    sigma = torch.cat((torch.logspace(1.5, -1.5, STEPS).double(), torch.zeros(1).double()))
    return torch.ones_like(sigma), sigma


GRIDS = {"preserving": _preserving, "flow": _flow, "exploding": _exploding}


@pytest.mark.parametrize("grid", GRIDS)
def test_a_step_is_an_euler_step_of_stochastic_localisation(grid: str) -> None:
    """In y = s x / alpha the kernel is y' = y + (s' - s) x0 + (s' - s)^.5 z (ASD)."""
    alpha, sigma = GRIDS[grid]()
    kernel = GaussianKernel.ancestral(alpha, sigma)
    x, clean, z = torch.randn(3, STEPS - 1, 5, dtype=torch.float64)
    step = torch.arange(STEPS - 1)  # s' is infinite in the last step
    s = (alpha / sigma) ** 2
    now, then, gap = s[:-2, None], s[1:-1, None], (s[1:-1] - s[:-2])[:, None]
    moved = now * x / alpha[:-2, None] + gap * clean + gap.sqrt() * z
    ours = kernel.mean(x, clean, step) + kernel.std_at(step, x) * z
    torch.testing.assert_close(then * ours / alpha[1:-1, None], moved, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_mismatch_of_two_predictions(grid: str) -> None:
    """r = ||m_p - m_q|| / std = (s' - s)^.5 ||x0_p - x0_q||, whatever the state."""
    alpha, sigma = GRIDS[grid]()
    kernel = GaussianKernel.ancestral(alpha, sigma)
    x, p, q = torch.randn(3, STEPS - 1, 7, dtype=torch.float64)
    step = torch.arange(STEPS - 1)
    gap = kernel.mean(x, p, step) - kernel.mean(x, q, step)
    r = (gap / kernel.std_at(step, x)).norm(dim=-1)
    s = (alpha / sigma)[:-1] ** 2
    torch.testing.assert_close(r, (s[1:] - s[:-1]).sqrt() * (p - q).norm(dim=-1))
    renoised = GaussianKernel.flow_renoise(sigma)
    if grid == "flow":  # fresh noise: r = (1 - t') / t' ||x0_p - x0_q||, larger
        gap = renoised.mean(x, p, step) - renoised.mean(x, q, step)
        worse = (gap / renoised.std_at(step, x)).norm(dim=-1)
        torch.testing.assert_close(worse, (alpha / sigma)[1:-1] * (p - q).norm(dim=-1))
        assert (worse > r).all()


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_steps_keep_the_marginals(grid: str, eta: float) -> None:
    """With the true x0 the next state is alpha' x0 + sigma' eps: mean and variance agree."""
    alpha, sigma = GRIDS[grid]()
    kernel = GaussianKernel.ddim(alpha, sigma, eta)
    mean = kernel.state * alpha[:-1] + kernel.clean
    variance = (kernel.state * sigma[:-1]) ** 2 + kernel.std**2
    torch.testing.assert_close(mean, alpha[1:])
    torch.testing.assert_close(variance, sigma[1:] ** 2)
    assert kernel.is_random == (*(eta > 0,) * (STEPS - 1), False)
    if eta == 1.0:
        one = GaussianKernel.ancestral(alpha, sigma)
        torch.testing.assert_close(kernel.state, one.state)
        torch.testing.assert_close(kernel.std, one.std)


def test_renoising_keeps_the_marginals() -> None:
    alpha, sigma = _flow()
    kernel = GaussianKernel.flow_renoise(sigma)
    assert torch.equal(kernel.clean, alpha[1:])
    assert torch.equal(kernel.std, sigma[1:])
    assert not kernel.state.any()


@pytest.mark.parametrize("churn", [0.0, 0.5, 1.0])
def test_churn_keeps_the_marginals_as_steps_shrink(churn: float) -> None:
    """An Euler-Maruyama step: its error in the next mean and variance is of second order."""

    def worst(steps: int) -> float:
        t = torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64)
        kernel = GaussianKernel.flow_churn(t, churn)
        mean = kernel.state * (1 - t[:-1]) + kernel.clean
        variance = (kernel.state * t[:-1]) ** 2 + kernel.std**2
        return float(((mean - 1 + t[1:]).abs() + (variance - t[1:] ** 2).abs()).max())

    if churn == 0:
        assert worst(8) < 1e-14  # along straight lines Euler is exact
    else:
        assert worst(40) < worst(20) / 3.5


def test_churn_is_the_table_of_the_stochastic_flow() -> None:
    """a x + b u with a = 1 - h c^2 / (1 - t), b = -h (1 + c^2), std c (2 t h / (1 - t))^.5."""
    t, churn = torch.tensor([0.9, 0.7, 0.4, 0.1]), 0.8
    kernel = GaussianKernel.flow_churn(t, churn)
    x, u = torch.randn(2, 3, 5, dtype=torch.float64)
    now, h = t[:-1].double()[:, None], (t[:-1] - t[1:]).double()[:, None]
    clean = x - now * u
    want = (1 - h * churn**2 / (1 - now)) * x - h * (1 + churn**2) * u
    step = torch.arange(3)
    torch.testing.assert_close(kernel.mean(x, clean, step), want, atol=1e-7, rtol=0)
    want = churn * (2 * now * h / (1 - now)).sqrt()
    torch.testing.assert_close(kernel.std_at(step, x), want, atol=1e-7, rtol=0)


def test_churn_leaves_both_ends_quiet() -> None:
    t = torch.linspace(1, 0, 5)
    kernel = GaussianKernel.flow_churn(t, 1.0)
    assert kernel.is_random == (False, True, True, False)
    euler = GaussianKernel.flow_churn(t, 0.0)
    for n in (0, 3):
        assert kernel.state[n] == euler.state[n]
        assert kernel.clean[n] == euler.clean[n]
    assert torch.isfinite(kernel.state).all()


def test_fixed_large_differs_in_its_std_alone() -> None:
    alpha, sigma = _preserving()
    small, large = GaussianKernel.ancestral(alpha, sigma), GaussianKernel.fixed_large(alpha, sigma)
    assert torch.equal(small.state, large.state)
    assert torch.equal(small.clean, large.clean)
    torch.testing.assert_close(large.std**2, 1 - (alpha[:-1] / alpha[1:]) ** 2)
    assert (large.std[:-1] > small.std[:-1]).all()
    silent = torch.arange(STEPS) == STEPS - 1
    assert large.is_random[-1]
    assert not large.deterministic(silent).is_random[-1]


def test_a_step_may_land_off_the_grid() -> None:
    """`landing` is the target level of a step; the state is read at the level of the grid."""
    alpha, sigma = _preserving()
    aims = (alpha[1:] * 0.9, (1 - (alpha[1:] * 0.9) ** 2).sqrt())
    kernel = GaussianKernel.ddim(alpha, sigma, 1.0, aims)
    torch.testing.assert_close(kernel.state * alpha[:-1] + kernel.clean, aims[0])
    variance = (kernel.state * sigma[:-1]) ** 2 + kernel.std**2
    torch.testing.assert_close(variance, aims[1] ** 2)
    assert torch.equal(kernel.alpha, alpha)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_state_has_four_parametrisations(grid: str) -> None:
    alpha, sigma = GRIDS[grid]()
    kernel = GaussianKernel.ancestral(alpha, sigma)
    x, clean = torch.randn(2, STEPS, 4, dtype=torch.float64)
    step = torch.arange(STEPS)
    eps = kernel.noise_from_clean(x, clean, step)
    torch.testing.assert_close(alpha[:-1, None] * clean + sigma[:-1, None] * eps, x)
    torch.testing.assert_close(kernel.clean_from_noise(x, eps, step), clean)
    v = kernel.velocity_from_clean(x, clean, step)
    torch.testing.assert_close(kernel.clean_from_velocity(x, v, step), clean)
    scale = (alpha**2 + sigma**2).sqrt()[:-1, None]  # v does not depend on how states are scaled
    one = GaussianKernel.ancestral(
        alpha / (alpha**2 + sigma**2).sqrt(), sigma / (alpha**2 + sigma**2).sqrt()
    )
    torch.testing.assert_close(one.velocity_from_clean(x / scale, clean, step), v)


def test_tables_take_the_precision_of_what_they_meet() -> None:
    kernel = GaussianKernel.ancestral(*_preserving())
    x = torch.randn(2, 3, 4, 4)
    assert kernel.mean(x, x, torch.tensor([0, 5])).dtype == torch.float32
    assert at_step(kernel.std, torch.tensor([[0, 1]]), x[None]).shape == (1, 2, 1, 1, 1)


def test_tables_of_unlike_length_are_refused() -> None:
    table = torch.ones(3)
    with pytest.raises(ValueError, match="give N entries each, and N \\+ 1 for alpha"):
        GaussianKernel(table, table, table, table, table)
