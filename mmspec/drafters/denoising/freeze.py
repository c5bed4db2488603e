"""The quantity of an old prediction that is frozen to predict later states.

freeze(kernel, x, clean, step) computes it from a prediction, mean(kernel, memory, x, step) applies
it at any state; at its own state that is the target's own mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mmspec.distributions.kernels import GaussianKernel


class Freeze(Protocol):
    """A quantity that represents a prediction."""

    def freeze(
        self, kernel: GaussianKernel, x: Tensor, clean: Tensor, step: Tensor
    ) -> Tensor: ...  # (..., *E) x2, (...) -> (..., *E)
    def mean(
        self, kernel: GaussianKernel, memory: Tensor, x: Tensor, step: Tensor
    ) -> Tensor: ...  # (..., *E) x2, (...) -> (..., *E)


@dataclass(frozen=True)
class Clean:
    """The clean sample x0: the best guess of an ideal denoiser's later ones (ASD, section 3).

    In the coordinates of stochastic localisation this freezes the drift, and the increments ahead
    are exchangeable (Hu et al. 2025).
    """

    def freeze(self, kernel: GaussianKernel, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:
        return clean

    def mean(self, kernel: GaussianKernel, memory: Tensor, x: Tensor, step: Tensor) -> Tensor:
        return kernel.mean(x, memory, step)


@dataclass(frozen=True)
class Velocity:
    """v = alpha eps - sigma x0, the output of a v-model."""

    def freeze(self, kernel: GaussianKernel, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:
        return kernel.velocity_from_clean(x, clean, step)

    def mean(self, kernel: GaussianKernel, memory: Tensor, x: Tensor, step: Tensor) -> Tensor:
        return kernel.mean(x, kernel.clean_from_velocity(x, memory, step), step)


@dataclass(frozen=True)
class FrozenNoise:
    """eps, the output of an eps-model, and with it the score up to a factor.

    The worst choice in many dimensions: an old eps is a poor guess of a new state's. Where a chain
    starts without any signal (alpha = 0) eps does not determine x0, and the mean is that of x0 = 0.
    """

    def freeze(self, kernel: GaussianKernel, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:
        return kernel.noise_from_clean(x, clean, step)

    def mean(self, kernel: GaussianKernel, memory: Tensor, x: Tensor, step: Tensor) -> Tensor:
        clean = kernel.clean_from_noise(x, memory, step).nan_to_num(0.0, 0.0, 0.0)
        return kernel.mean(x, clean, step)


@dataclass(frozen=True)
class Increment:
    """m(x) - x, the whole step. Worse than `Clean`: the kernel's linear part is frozen with it."""

    def freeze(self, kernel: GaussianKernel, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:
        return kernel.mean(x, clean, step) - x

    def mean(self, kernel: GaussianKernel, memory: Tensor, x: Tensor, step: Tensor) -> Tensor:
        return x + memory


FREEZES: dict[str, Freeze] = {
    "clean": Clean(),
    "velocity": Velocity(),
    "noise": FrozenNoise(),
    "increment": Increment(),
}
