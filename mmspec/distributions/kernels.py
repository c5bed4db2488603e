"""Gaussian transition kernels of diffusion samplers.

A sampler that adds noise moves a state x to the next one by

    x' ~ N(a x + b x0, s^2),        x0 = the model's prediction of the clean sample,

and samplers differ only in the tables (a, b, s). One kernel class therefore covers them all, and a
draft with its own x0, or an earlier one of the target, has a distribution of the target's form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

Levels = tuple[Tensor, Tensor]  # alpha and sigma


@dataclass(frozen=True)
class GaussianKernel:
    """Tables over N transitions; step n leads from state n to state n + 1, the last is data.

    All tables are float64 (N,). `alpha` and `sigma` (N + 1,) define the states in terms of clean
    sample and noise, x = alpha x0 + sigma eps. Only drafts use them, not the steps.
    """

    state: Tensor  # a
    clean: Tensor  # b
    std: Tensor  # s; 0 = deterministic
    alpha: Tensor
    sigma: Tensor
    is_predicted: bool = False  # whether the network predicts the std, with s as its scale
    extrapolation: Tensor | None = None  # of second-order solvers, see `extrapolate`; None = 0

    def __post_init__(self) -> None:
        sizes = {len(table) for table in (self.state, self.clean, self.std)}
        ends = {len(self.alpha) - 1, len(self.sigma) - 1}
        if sizes != ends or len(sizes) != 1:
            raise ValueError(
                f"the tables of a kernel have {sorted(sizes)} steps and {sorted(ends)} between "
                "states; give N entries each, and N + 1 for alpha and sigma"
            )

    @classmethod
    def ancestral(
        cls, alpha: Tensor, sigma: Tensor, landing: Levels | None = None
    ) -> GaussianKernel:
        """The posterior of the forward process, for any grid of (alpha, sigma), each (N + 1,).

        DDPM with variance "fixed_small", DDIM with eta = 1, Euler ancestral (alpha = 1),
        SDE-DPM-Solver++ of order 1 and the Euler step of stochastic localisation are instances, and
        so is flow matching (alpha = 1 - t, sigma = t). With s = alpha^2 / sigma^2:

            a = (alpha' / s') s / alpha,  b = alpha' (1 - s / s'),  std = (alpha' / s') (s' - s)^.5

        `landing` (N,) each are the levels that the steps aim at, for a sampler whose next state is
        read at another level of the grid (DDIM, whose stride is fixed).
        """
        alpha, sigma = alpha.double(), sigma.double()
        last, noise = _landing(alpha, sigma, landing)
        share = (noise / last) ** 2 * (alpha[:-1] / sigma[:-1]) ** 2  # s / s', 0 on a clean end
        state = (noise / last) ** 2 * last * alpha[:-1] / sigma[:-1] ** 2
        std = noise * (1 - share).clamp_min(0).sqrt()  # (alpha' / s') (s' - s)^.5
        return cls(state, last * (1 - share), std, alpha, sigma)

    @classmethod
    def fixed_large(cls, alpha: Tensor, sigma: Tensor) -> GaussianKernel:
        """The mean of `ancestral`, the std of the forward step (Ho et al. 2020, beta_t).

        For alpha^2 + sigma^2 = 1. Not zero in the last step; apply `deterministic` for a sampler
        that adds no noise there.
        """
        kernel = cls.ancestral(alpha, sigma)
        share = (kernel.alpha[:-1] / kernel.alpha[1:]) ** 2
        return replace(kernel, std=(1 - share).clamp_min(0).sqrt())

    @classmethod
    def ddim(
        cls, alpha: Tensor, sigma: Tensor, eta: float | Tensor, landing: Levels | None = None
    ) -> GaussianKernel:
        """DDIM (Song et al. 2021, eq. 12): mean alpha' x0 + (sigma'^2 - std^2)^.5 eps.

        std is `eta` times that of the ancestral kernel; eta = 0 is deterministic.
        """
        alpha, sigma = alpha.double(), sigma.double()
        last, noise = _landing(alpha, sigma, landing)
        std = eta * cls.ancestral(alpha, sigma, landing).std
        toward = (noise**2 - std**2).clamp_min(0).sqrt() / sigma[:-1]
        return cls(toward, last - toward * alpha[:-1], std, alpha, sigma)

    @classmethod
    def flow_churn(cls, t: Tensor, churn: float) -> GaussianKernel:
        """Euler-Maruyama steps of a flow x = (1 - t) x0 + t eps, at times t (N + 1,) falling to 0.

        The reverse equation with the marginals of the flow (De Bortoli et al. 2025), step h:

            dx = h (-u + g^2 score / 2) + g h^.5 z,  g^2 = 2 churn^2 t / (1 - t),  u = eps - x0

        churn = 0 is the deterministic Euler step; so are the step from t = 1, where g is infinite,
        and a step to t = 0, which would leave noise in the sample.
        """
        t = t.double()
        now, step = t[:-1], t[:-1] - t[1:]
        noisy = (now < 1) & (t[1:] > 0)
        rate = torch.where(noisy, churn**2 / (1 - now).clamp_min(1e-12), torch.zeros_like(now))
        toward = torch.where(noisy, -step * (1 + churn**2), -step)  # of u = (x - x0) / t
        std = (2 * rate * now * step).sqrt()
        return cls(1 - step * rate + toward / now, -toward / now, std, 1 - t, t)

    @classmethod
    def flow_renoise(cls, t: Tensor) -> GaussianKernel:
        """Jump to the clean sample of a flow and add fresh noise: N((1 - t') x0, t'^2).

        The next state depends on the old one only through x0, so drafts are rejected more often
        than with `ancestral`, which has the same marginals.
        """
        t = t.double()
        return cls(torch.zeros_like(t[1:]), 1 - t[1:], t[1:], 1 - t, t)

    def deterministic(self, mask: Tensor) -> GaussianKernel:  # (N,) bool
        """The same means, without noise in the steps of `mask`."""
        return replace(self, std=self.std.masked_fill(mask, 0.0))

    @property
    def num_steps(self) -> int:
        return len(self.std)

    @cached_property
    def is_random(self) -> tuple[bool, ...]:
        """Which transitions add noise; no draft is verified across one that does not."""
        return tuple((self.std > 0).tolist())

    @cached_property
    def noise_scale(self) -> Tensor:  # (N,)
        """The std of the ancestral step on this grid: a scale for errors even where `std` is 0."""
        return GaussianKernel.ancestral(self.alpha, self.sigma).std

    def mean(self, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:  # (..., *E) x2, (...)
        """The mean of the next state, given x at `step` and the clean sample predicted from it."""
        a, b = (at_step(table, step, x) for table in (self.state, self.clean))
        return a * x + b * clean

    def extrapolate(self, clean: Tensor, before: Tensor, step: Tensor) -> Tensor:
        """The x0 of a two-step solver, (..., *E) x2, (...): clean + extrapolation (clean - before).

        `before` is the prediction one step earlier (DPM-Solver++ of order 2, Lu et al. 2022). Given
        it, the next state is Gaussian as for other solvers.
        """
        if self.extrapolation is None:
            return clean
        share = at_step(self.extrapolation, step, clean)
        return clean + share * (clean - before)

    def std_at(self, step: Tensor, like: Tensor) -> Tensor:  # (...) -> (..., 1, 1, ...)
        """The standard deviation of the next state, shaped to broadcast against `like`."""
        return at_step(self.std, step, like)

    def noise_from_clean(self, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:
        """eps with x = alpha clean + sigma eps."""
        return (x - at_step(self.alpha, step, x) * clean) / at_step(self.sigma, step, x)

    def clean_from_noise(self, x: Tensor, eps: Tensor, step: Tensor) -> Tensor:
        """The clean sample with x = alpha clean + sigma eps."""
        return (x - at_step(self.sigma, step, x) * eps) / at_step(self.alpha, step, x)

    def velocity_from_clean(self, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:
        """v = alpha eps - sigma clean (Salimans & Ho 2022) of the state scaled to variance 1."""
        alpha, sigma = at_step(self.alpha, step, x), at_step(self.sigma, step, x)
        eps = self.noise_from_clean(x, clean, step)
        return (alpha * eps - sigma * clean) / (alpha**2 + sigma**2).sqrt()

    def clean_from_velocity(self, x: Tensor, v: Tensor, step: Tensor) -> Tensor:
        """The clean sample whose `velocity_from_clean` x is v."""
        alpha, sigma = at_step(self.alpha, step, x), at_step(self.sigma, step, x)
        scale = alpha**2 + sigma**2
        return (alpha * x - sigma * scale.sqrt() * v) / scale


def at_step(values: Tensor, step: Tensor, like: Tensor) -> Tensor:
    """Entries at `step` (...), shaped to broadcast against `like` (..., *E)."""
    picked = values.to(like.dtype).to(like.device)[step]
    shape: Sequence[int] = (*step.shape, *(1,) * (like.dim() - step.dim()))
    return picked.reshape(shape)


def _landing(alpha: Tensor, sigma: Tensor, landing: Levels | None) -> Levels:
    if landing is None:
        return alpha[1:], sigma[1:]
    return landing[0].double(), landing[1].double()
