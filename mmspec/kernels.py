"""The random steps of a diffusion sampler: Gaussian, with a mean that is linear in two things.

Every sampler that adds noise moves a state x to the next one by

    x' ~ N(a x + b x0, s^2),        x0 = what the model takes the clean sample to be,

and samplers differ in the tables (a, b, s) alone. So one kernel serves them all, and a draft that
knows an x0 (its own, or an old one of the target) has a law like the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class GaussianKernel:
    """Tables over N transitions; step n leads from state n to state n + 1, data comes last.

    All tables are float64 (N,). `alpha` and `sigma` (N + 1,) say how states are made of clean
    sample and noise, x = alpha x0 + sigma eps; they serve drafts, the steps themselves do not need
    them.
    """

    state: Tensor  # a
    clean: Tensor  # b
    std: Tensor  # s; 0 = deterministic
    alpha: Tensor
    sigma: Tensor

    def __post_init__(self) -> None:
        sizes = {len(table) for table in (self.state, self.clean, self.std)}
        ends = {len(self.alpha) - 1, len(self.sigma) - 1}
        if sizes != ends or len(sizes) != 1:
            raise ValueError(
                f"the tables of a kernel have {sorted(sizes)} steps and {sorted(ends)} between "
                "states; give N entries each, and N + 1 for alpha and sigma"
            )

    @classmethod
    def ancestral(cls, alpha: Tensor, sigma: Tensor) -> GaussianKernel:
        """The posterior of the forward process, for any grid of (alpha, sigma), each (N + 1,).

        DDPM with variance "fixed_small", DDIM with eta = 1, Euler ancestral (alpha = 1),
        SDE-DPM-Solver++ of order 1 and the Euler step of stochastic localisation are all this, and
        it serves flow matching too (alpha = 1 - t, sigma = t). With s = alpha^2 / sigma^2:

            a = (alpha' / s') s / alpha,  b = alpha' (1 - s / s'),  std = (alpha' / s') (s' - s)^.5
        """
        alpha, sigma = alpha.double(), sigma.double()
        last, noise = alpha[1:], sigma[1:]
        share = (noise / last) ** 2 * (alpha[:-1] / sigma[:-1]) ** 2  # s / s', 0 on a clean end
        state = (noise / last) ** 2 * last * alpha[:-1] / sigma[:-1] ** 2
        std = noise * (1 - share).clamp_min(0).sqrt()  # (alpha' / s') (s' - s)^.5
        return cls(state, last * (1 - share), std, alpha, sigma)

    @classmethod
    def ddim(cls, alpha: Tensor, sigma: Tensor, eta: float | Tensor) -> GaussianKernel:
        """DDIM (Song et al. 2021, eq. 12): mean alpha' x0 + (sigma'^2 - std^2)^.5 eps.

        std is `eta` times that of the ancestral kernel; eta = 0 is deterministic.
        """
        alpha, sigma = alpha.double(), sigma.double()
        std = eta * cls.ancestral(alpha, sigma).std
        toward = (sigma[1:] ** 2 - std**2).clamp_min(0).sqrt() / sigma[:-1]
        return cls(toward, alpha[1:] - toward * alpha[:-1], std, alpha, sigma)

    @property
    def steps(self) -> int:
        return len(self.std)

    @cached_property
    def is_random(self) -> tuple[bool, ...]:
        """Which transitions draw noise; no draft is verified across one that does not."""
        return tuple((self.std > 0).tolist())

    def mean(self, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:  # (..., *E) x2, (...)
        """The mean of the next state, given x at `step` and the clean sample seen in it."""
        a, b = (_table(t, step, x) for t in (self.state, self.clean))
        return a * x + b * clean

    def deviation(self, step: Tensor, like: Tensor) -> Tensor:  # (...) -> (..., 1, 1, ...)
        """The standard deviation of the next state, shaped to broadcast against `like`."""
        return _table(self.std, step, like)

    def noise_in(self, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:
        """eps with x = alpha clean + sigma eps."""
        return (x - _table(self.alpha, step, x) * clean) / _table(self.sigma, step, x)

    def clean_from_noise(self, x: Tensor, eps: Tensor, step: Tensor) -> Tensor:
        """The clean sample with x = alpha clean + sigma eps."""
        return (x - _table(self.sigma, step, x) * eps) / _table(self.alpha, step, x)

    def velocity_in(self, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:
        """v = alpha eps - sigma clean (Salimans & Ho 2022)."""
        eps = self.noise_in(x, clean, step)
        return _table(self.alpha, step, x) * eps - _table(self.sigma, step, x) * clean

    def clean_from_velocity(self, x: Tensor, v: Tensor, step: Tensor) -> Tensor:
        """The clean sample with v = alpha eps - sigma clean."""
        alpha, sigma = _table(self.alpha, step, x), _table(self.sigma, step, x)
        return (alpha * x - sigma * v) / (alpha**2 + sigma**2)


def _table(values: Tensor, step: Tensor, like: Tensor) -> Tensor:
    """Entries at `step` (...), shaped to broadcast against `like` (..., *E)."""
    picked = values.to(like.device)[step].to(like.dtype)
    shape: Sequence[int] = (*step.shape, *(1,) * (like.dim() - step.dim()))
    return picked.reshape(shape)
