"""Normal distributions over continuous tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Keys


@dataclass(frozen=True)
class Gaussian:
    """Independent normals over an event of any shape, with one or several standard deviations."""

    mean: Tensor  # (..., *E)
    std: Tensor  # broadcasts against mean; 0 = deterministic
    events: int  # number of trailing axes of `mean` that form the event
    invalid_reason: ClassVar[str] = "predictions are NaN or infinite"

    @property
    def batch(self) -> torch.Size:
        return self.mean.shape[: self.mean.dim() - self.events]

    def invalid_mask(
        self, mask: Tensor | None = None
    ) -> Tensor:  # distribution (B, M) -> (B,) bool
        """Rows in which some mean is not finite; `mask` (B, M) excludes padding."""
        broken = ~self.mean.isfinite().flatten(2).all(-1)
        if mask is not None:
            broken = broken & mask
        return broken.any(-1)

    def log_prob(self, x: Tensor) -> Tensor:  # (..., *E) -> (...)
        std = self.std.expand_as(self.mean)
        terms = -0.5 * ((x - self.mean) / std) ** 2 - std.log() - 0.9189385332046727
        return terms.flatten(len(self.batch)).sum(-1)

    def sample(self, keys: Keys) -> Tensor:  # (...) -> (..., *E)
        event = self.mean.shape[len(self.batch) :]
        return self.mean + self.std * keys.normal(*event).to(self.mean.dtype)

    def residual(self, other: Gaussian) -> GaussianResidual:
        return GaussianResidual(self, other)

    def __getitem__(self, index: Any) -> Gaussian:
        return Gaussian(self.mean[index], self.std.expand_as(self.mean)[index], self.events)


@dataclass(frozen=True)
class DrivingNoise:
    """The normal noise from which the continuous tokens of a draft were sampled (`Draft.extras`).

    Recovering it from the tokens would be biased, because they are rounded.
    """

    noise: Tensor  # (B, N, *E)


@dataclass(frozen=True)
class GaussianResidual:
    """The distribution proportional to (p - q)+ of two Gaussians.

    Sampled by thinning p with 1 - min(1, q/p). The expected number of trials is 1 / TV(p, q); equal
    distributions have no residual. Raises ValueError after `max_trials`.
    """

    p: Gaussian
    q: Gaussian
    max_trials: int = 100_000

    @property
    def batch(self) -> torch.Size:
        return self.p.batch

    def sample(self, keys: Keys) -> Tensor:  # (...) -> (..., *E)
        x = self.p.sample(keys.split(0))
        open_ = torch.ones(self.batch, dtype=torch.bool, device=x.device)
        for trial in range(self.max_trials):
            ratio = (self.q.log_prob(x) - self.p.log_prob(x)).clamp(max=0).exp()
            open_ = open_ & (keys.split(2 * trial + 1).uniform() < ratio)
            if not bool(open_.any()):
                return x
            where = open_.reshape(open_.shape + (1,) * self.p.events)
            x = torch.where(where, self.p.sample(keys.split(2 * trial + 2)), x)
        raise ValueError(
            "the residual of two (nearly) equal Gaussians does not exist; accept instead"
        )
