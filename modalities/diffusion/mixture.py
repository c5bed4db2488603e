"""Denoising chains of Gaussian mixtures, whose optimal denoiser has a closed form.

data = mixture(d=2, components=3, seed=0)
denoiser = data.denoiser(GaussianKernel.ancestral(*vp_grid(20, "cosine")))
request = ChainRequest(start, KeyedNoise.from_seed(0, batch, device))
decode(Parts(ChainTarget(denoiser), drafter, verifier, Stop(20)), request)

Recipes are certified on them: no training is needed, and the sampler's increments are known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmspec.distributions.kernels import GaussianKernel
from mmspec.targets.continuous.denoising import Prediction


@dataclass(frozen=True)
class Mixture:
    """Isotropic Gaussians of `std` around `means`, with mixture `weights`; all float64."""

    means: Tensor  # (C, d)
    std: Tensor  # (C,)
    weights: Tensor  # (C,), sum to 1

    def denoiser(self, kernel: GaussianKernel) -> ExactDenoiser:
        """E[x0 | x] on the grid of `kernel`; states are (R, *E) with d numbers in E."""
        return ExactDenoiser(self, kernel)

    def sample(self, n: int, seed: int = 0) -> Tensor:  # (n, d) float32
        """Samples of the data."""
        generator = torch.Generator().manual_seed(seed)
        component = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        eps = torch.randn(n, self.means.shape[1], generator=generator, dtype=torch.float64)
        return (self.means[component] + self.std[component, None] * eps).float()

    def log_density(self, x: Tensor, alpha: float = 1.0, sigma: float = 0.0) -> Tensor:
        """log p of alpha x0 + sigma eps at x (..., d) -> (...); default: the data."""
        a, s = (torch.tensor(value, dtype=torch.float64) for value in (alpha, sigma))
        return self._parts(x.double(), a, s).logsumexp(-1)

    def component(self, x: Tensor) -> Tensor:  # (n, d) -> (n,)
        """The most likely component of clean samples."""
        one = torch.ones((), dtype=torch.float64)
        return self._parts(x.double(), one, 0 * one).argmax(-1)

    def clean(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:  # (R, d), (R,) x2
        """E[x0 | alpha x0 + sigma eps = x], float64."""
        weight = self._parts(x, alpha, sigma).softmax(-1)  # (R, C)
        total = (alpha[:, None] * self.std) ** 2 + sigma[:, None] ** 2
        gain = alpha[:, None] * self.std**2 / total  # (R, C)
        gap = x[:, None] - alpha[:, None, None] * self.means  # (R, C, d)
        return (weight[..., None] * (self.means + gain[..., None] * gap)).sum(1)

    def _parts(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:  # -> (..., C)
        """log (weight times density) of every component."""
        total = (alpha[..., None] * self.std) ** 2 + sigma[..., None] ** 2
        gap = x[..., None, :] - alpha[..., None, None] * self.means
        d = self.means.shape[1]
        normal = -0.5 * (gap**2).sum(-1) / total - 0.5 * d * (2 * math.pi * total).log()
        return self.weights.log() + normal


@dataclass(frozen=True)
class ExactDenoiser:
    """The posterior mean of a mixture, computed per state."""

    data: Mixture
    kernel: GaussianKernel
    width: int = 1

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        alpha, sigma = self.kernel.alpha[step], self.kernel.sigma[step]
        clean = self.data.clean(states.flatten(1).double(), alpha, sigma)
        return Prediction(clean.reshape(states.shape).to(states.dtype))


def mixture(d: int, components: int, seed: int, std: float = 0.3) -> Mixture:
    """A random mixture: means about 2 apart for any `d`, unequal weights and widths."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(components, d, generator=generator, dtype=torch.float64) * math.sqrt(2 / d)
    spread = std * (0.75 + 0.5 * torch.rand(components, generator=generator, dtype=torch.float64))
    weights = 0.5 + torch.rand(components, generator=generator, dtype=torch.float64)
    return Mixture(means, spread, weights / weights.sum())


def vp_grid(
    n: int, schedule: Literal["linear", "cosine"] = "cosine"
) -> tuple[Tensor, Tensor]:  # alpha and sigma, (n + 1,) each
    """Variance-preserving levels, noise first, data (alpha 1, sigma 0) last.

    "linear" is the 1000-step DDPM schedule at n of its steps, "cosine" that of iDDPM.
    """
    if schedule == "linear":
        signal = (1 - torch.linspace(1e-4, 2e-2, 1000, dtype=torch.float64)).cumprod(0)
        signal = signal[torch.linspace(999, 999 // n, n).round().long()]
    else:
        time = torch.linspace(1, 0, n + 1, dtype=torch.float64)[:-1].clamp_max(0.995)
        signal = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    signal = torch.cat([signal, signal.new_ones(1)])
    return signal.sqrt(), (1 - signal).sqrt()
