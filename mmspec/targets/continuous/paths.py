"""The distribution of a token sampled by a diffusion head, over its whole path from noise to data.

The density of a stochastic head's tokens cannot be computed, but that of its paths x_0 (noise),
x_1, ..., x_T (the token) can: a product of Gaussian steps,

    P(x) = N(x_0; 0, 1) N(x_1; m(x_0), s(x_0)) ... N(x_T; m(x_{T-1}), s(x_{T-1})).

A method that is exact for paths is exact for the tokens at their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.distributions.gaussian import Gaussian
from mmspec.distributions.kernels import GaussianKernel
from mmspec.distributions.noise import Keys
from mmspec.targets.continuous.denoising import Prediction

_ROWS = 1 << 14  # rows of a head per call
_FIRST, _WIDEST = 4, 256  # parallel tries


class Head(Protocol):
    """A diffusion head with its sampler; rows are independent.

    A condition has G branches of D numbers (2 with guidance) and the guidance `scale`. A step may
    have a predicted std although the sampler adds no noise in it.
    """

    @property
    def kernel(self) -> GaussianKernel: ...
    @property
    def event(self) -> torch.Size: ...
    def predict(
        self, states: Tensor, step: Tensor, condition: Tensor, scale: Tensor
    ) -> Prediction: ...  # (R, *E), (R,), (R, G, D), (R,)


@dataclass(frozen=True)
class PathDistribution:
    """Paths (..., S, *E) of S = T + 1 states; positions that are not `real` are zero."""

    head: Head
    condition: Tensor  # (..., G, D)
    scale: Tensor  # (...)
    real: Tensor  # (...) bool
    invalid_reason: ClassVar[str] = (
        "diffusion head has conditions or outputs that are NaN or infinite"
    )

    @property
    def batch(self) -> torch.Size:
        return self.real.shape

    @property
    def states(self) -> int:
        """S."""
        return self.head.kernel.num_steps + 1

    def walk(
        self, noise: Tensor
    ) -> tuple[Tensor, Gaussian]:  # (..., S, *E) -> the same, distributions
        """The path of given standard normal noise, and the distribution of each of its states."""
        kernel, condition, scale = (
            self.head.kernel,
            self.condition[self.real],
            self.scale[self.real],
        )
        driving = noise[self.real]
        if not len(driving):
            nothing = driving.unbind(1)
            return self._scatter_real(driving, 0.0), self._distribution(nothing, nothing)
        x = driving[:, 0]
        path, means, stds = [x], [torch.zeros_like(x)], [torch.ones_like(x)]
        for index in range(kernel.num_steps):
            step = torch.full((len(x),), index, device=x.device)
            mean, std = self._step(x, step, condition, scale)
            x = mean + std * driving[:, index + 1] if kernel.is_random[index] else mean
            for line, value in ((path, x), (means, mean), (stds, std)):
                line.append(value)
        return self._scatter_real(torch.stack(path, 1), 0.0), self._distribution(means, stds)

    def step_distributions(self, paths: Tensor) -> Gaussian:  # (..., S, *E)
        """The distribution of each state of given paths after the state before. One head call."""
        states = paths[self.real][:, :-1]
        count, steps = states.shape[:2]
        step = torch.arange(steps, device=states.device).repeat(count)
        condition = self.condition[self.real].repeat_interleave(steps, 0)
        scale = self.scale[self.real].repeat_interleave(steps)
        given = (states.flatten(0, 1), step, condition, scale)
        parts = zip(*(value.split(_ROWS) for value in given), strict=True)
        found = [self._step(*part) for part in parts]
        if not found:
            found = [(states.flatten(0, 1), states.flatten(0, 1))]
        mean, std = (torch.cat(values).view_as(states) for values in zip(*found, strict=True))
        first = torch.zeros_like(states[:, :1])
        return self._distribution([first[:, 0], *mean.unbind(1)], [first[:, 0] + 1, *std.unbind(1)])

    def log_prob(self, x: Tensor) -> Tensor:  # (..., S, *E) -> (...) float64
        """The log density of paths; 0 where they are not real.

        Raises ValueError if a step adds no noise: such paths have no density.
        """
        check_random(self.head.kernel)
        distribution = self.step_distributions(x)
        wide = Gaussian(distribution.mean.double(), distribution.std.double(), distribution.events)
        return torch.where(self.real, wide.log_prob(x.double()), 0)

    def sample(self, keys: Keys) -> Tensor:  # (...) -> (..., S, *E)
        return self.walk(self.noise(keys))[0]

    def noise(self, keys: Keys) -> Tensor:  # (...) -> (..., S, *E)
        """The standard normal noise of whole paths."""
        return keys.normal(self.states, *self.head.event)

    def residual(self, other: PathDistribution) -> PathResidual:
        return PathResidual(self, other)

    def invalid_mask(
        self, mask: Tensor | None = None
    ) -> Tensor:  # distribution (B, M, K) -> (B,) bool
        """Rows in which a condition is not finite; `mask` (B, M) selects positions."""
        broken = (~self.condition.isfinite().flatten(self.real.dim()).all(-1) & self.real).any(-1)
        return (broken if mask is None else broken & mask).any(-1)

    def reshape(self, *batch: int) -> PathDistribution:
        """Reshape the batch."""
        tail = self.condition.shape[-2:]
        return replace(
            self,
            condition=self.condition.reshape(*batch, *tail),
            scale=self.scale.reshape(batch),
            real=self.real.reshape(batch),
        )

    def scatter(
        self, where: Tensor
    ) -> PathDistribution:  # distribution (R, K), where (B, M) bool with R True
        """Scatter to the R true entries of B x M positions; the others are not real."""
        return replace(
            self,
            condition=_scatter_places(self.condition, where),
            scale=_scatter_places(self.scale, where),
            real=_scatter_places(self.real, where),
        )

    def __getitem__(self, index: Any) -> PathDistribution:
        return replace(
            self, condition=self.condition[index], scale=self.scale[index], real=self.real[index]
        )

    @staticmethod
    def stack(distributions: Sequence[PathDistribution], dim: int = 1) -> PathDistribution:
        """Stack distributions of equal batch shape along a new batch axis."""
        parts = zip(
            *(
                (distribution.condition, distribution.scale, distribution.real)
                for distribution in distributions
            ),
            strict=True,
        )
        return PathDistribution(
            distributions[0].head, *(torch.stack(values, dim) for values in parts)
        )

    def _step(
        self, x: Tensor, step: Tensor, condition: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean and std of the next state, both (R, *E)."""
        kernel, seen = self.head.kernel, self.head.predict(x, step, condition, scale)
        mean = kernel.mean(x, seen.clean, step)
        std = kernel.std_at(step, x).expand_as(x) if seen.std is None else seen.std
        return mean, std

    def _distribution(self, means: Sequence[Tensor], stds: Sequence[Tensor]) -> Gaussian:
        mean = self._scatter_real(torch.stack(list(means), 1), 0.0)
        std = self._scatter_real(torch.stack(list(stds), 1), 1.0)
        return Gaussian(mean, std, 1 + len(self.head.event))

    def _scatter_real(self, values: Tensor, rest: float) -> Tensor:  # (R, S, *E) -> (..., S, *E)
        """Scatter values of the real positions to all positions."""
        placed = values.new_full((*self.batch, *values.shape[1:]), rest)
        placed[self.real] = values
        return placed


@dataclass(frozen=True)
class PathResidual:
    """The path distribution proportional to (P - Q)+, by rejection from P with 1 - min(1, Q / P).

    1 / TV(P, Q) tries are expected, and a path is rejected with probability TV, so one per tested
    path. Tries are parallel, a few at first, then twice as many each time: several cost little more
    than one. Raises ValueError after `max_trials`: the distributions are then equal up to rounding,
    and the residual does not exist.
    """

    p: PathDistribution
    q: PathDistribution
    max_trials: int = 1 << 14

    @property
    def batch(self) -> torch.Size:
        return self.p.batch

    def sample(self, keys: Keys) -> Tensor:  # (R,) -> (R, S, *E)
        paths = self.p._scatter_real(
            keys.normal(self.p.states, *self.p.head.event)[self.p.real], 0.0
        )
        left = self.p.real.nonzero().squeeze(1)
        made = 0
        while len(left):
            if made >= self.max_trials:
                raise ValueError(
                    f"{made} tries found no path of the residual of two distributions: they are "
                    "equal up to rounding; use another seed, or compute in a wider dtype"
                )
            tries = min(max(made, _FIRST), _WIDEST)
            found, hit = self._try_candidates(left, keys, range(made, made + tries))
            done = hit.any(-1)
            first = hit.int().argmax(-1)
            paths[left[done]] = found[torch.arange(len(left), device=left.device), first][done]
            left, made = left[~done], made + tries
        return paths

    def _try_candidates(self, rows: Tensor, keys: Keys, numbers: range) -> tuple[Tensor, Tensor]:
        """Candidates (r, n, S, *E), and which of them are accepted (r, n)."""
        own = Keys(keys.key[rows])
        several = Keys(torch.stack([own.split(2 * number).key for number in numbers], 1))
        coin = torch.stack([own.split(2 * number + 1).uniform() for number in numbers], 1)
        wide = rows[:, None].expand(-1, len(numbers))
        p, q = self.p[wide], self.q[wide]
        paths = p.sample(several)
        ratio = (q.log_prob(paths) - p.log_prob(paths)).clamp_max(0).exp()
        return paths, ~(coin < ratio)  # where a density is NaN, Q excludes nothing


def check_random(kernel: GaussianKernel) -> None:
    """Check that every step of a sampler adds noise. Raises ValueError."""
    if not all(kernel.is_random):
        steps = [index for index, noisy in enumerate(kernel.is_random) if not noisy]
        raise ValueError(
            f"the head adds no noise in step {steps[0]} of {kernel.num_steps}, so its paths have "
            "no density to compare; give last_noise=True, a sampler that keeps the noise of its "
            "last step, or use a recipe that compares none"
        )


def _scatter_places(values: Tensor, where: Tensor) -> Tensor:  # (R, ...), (B, M) -> (B, M, ...)
    placed = values.new_zeros(*where.shape, *values.shape[1:])
    placed[where] = values
    return placed
