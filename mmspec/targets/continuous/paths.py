"""The distribution of a token that a diffusion head draws: of its whole path from noise to data.

A head that adds noise on the way has no density of its tokens that could be computed, but one of
its paths x_0 (noise), x_1, ..., x_T (the token): a product of Gaussian steps,

    P(x) = N(x_0; 0, 1) N(x_1; m(x_0), s(x_0)) ... N(x_T; m(x_{T-1}), s(x_{T-1})).

What is exact for paths is exact for the tokens at their ends.
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

_ROWS = 1 << 14  # rows of a head at a time
_FIRST, _WIDEST = 4, 256  # tries side by side


class Head(Protocol):
    """A diffusion head with its sampler; every row is computed on its own.

    A condition has G branches of D numbers (2 with guidance) and the `scale` that joins them.
    A step may have a predicted std though the kernel says that the sampler adds no noise in it.
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
    """Paths (..., S, *E) of S = T + 1 states; places that are not `real` hold zeros."""

    head: Head
    condition: Tensor  # (..., G, D)
    scale: Tensor  # (...)
    real: Tensor  # (...) bool
    trouble: ClassVar[str] = "conditions of the diffusion head are NaN or infinite"

    @property
    def batch(self) -> torch.Size:
        return self.real.shape

    @property
    def states(self) -> int:
        """S."""
        return self.head.kernel.steps + 1

    def walk(
        self, noise: Tensor
    ) -> tuple[Tensor, Gaussian]:  # (..., S, *E) -> the same, distributions
        """The path that standard normal noise drives, and the distribution of each of its states."""
        kernel, condition, scale = (
            self.head.kernel,
            self.condition[self.real],
            self.scale[self.real],
        )
        driving = noise[self.real]
        if not len(driving):
            nothing = driving.unbind(1)
            return self._placed(driving, 0.0), self._distribution(nothing, nothing)
        x = driving[:, 0]
        path, means, stds = [x], [torch.zeros_like(x)], [torch.ones_like(x)]
        for index in range(kernel.steps):
            step = torch.full((len(x),), index, device=x.device)
            mean, std = self._step(x, step, condition, scale)
            x = mean + std * driving[:, index + 1] if kernel.is_random[index] else mean
            for line, value in ((path, x), (means, mean), (stds, std)):
                line.append(value)
        return self._placed(torch.stack(path, 1), 0.0), self._distribution(means, stds)

    def along(self, paths: Tensor) -> Gaussian:  # (..., S, *E)
        """The distribution of each state of given paths, after the state before: one call of the head."""
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

        Raises ValueError where a step adds no noise: such paths have none.
        """
        check_random(self.head.kernel)
        distribution = self.along(x)
        wide = Gaussian(distribution.mean.double(), distribution.std.double(), distribution.events)
        return torch.where(self.real, wide.log_prob(x.double()), 0)

    def sample(self, keys: Keys) -> Tensor:  # (...) -> (..., S, *E)
        return self.walk(self.noise(keys))[0]

    def noise(self, keys: Keys) -> Tensor:  # (...) -> (..., S, *E)
        """The standard normal noise of whole paths."""
        return keys.normal(self.states, *self.head.event)

    def residual(self, other: PathDistribution) -> PathResidual:
        return PathResidual(self, other)

    def broken(self, mask: Tensor | None = None) -> Tensor:  # distribution (B, M, K) -> (B,) bool
        """Rows in which some condition is not finite; `mask` (B, M) leaves places out."""
        broken = (~self.condition.isfinite().flatten(self.real.dim()).all(-1) & self.real).any(-1)
        return (broken if mask is None else broken & mask).any(-1)

    def reshape(self, *batch: int) -> PathDistribution:
        """The same places in another batch shape."""
        tail = self.condition.shape[-2:]
        return replace(
            self,
            condition=self.condition.reshape(*batch, *tail),
            scale=self.scale.reshape(batch),
            real=self.real.reshape(batch),
        )

    def among(
        self, where: Tensor
    ) -> PathDistribution:  # distribution (R, K), where (B, M) bool with R True
        """The distribution in R of B x M places; the others are not real."""
        return replace(
            self,
            condition=_among(self.condition, where),
            scale=_among(self.scale, where),
            real=_among(self.real, where),
        )

    def __getitem__(self, index: Any) -> PathDistribution:
        return replace(
            self, condition=self.condition[index], scale=self.scale[index], real=self.real[index]
        )

    @staticmethod
    def stack(distributions: Sequence[PathDistribution], dim: int = 1) -> PathDistribution:
        """Join distributions of equal batch shape along a new batch axis."""
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
        std = kernel.deviation(step, x).expand_as(x) if seen.std is None else seen.std
        return mean, std

    def _distribution(self, means: Sequence[Tensor], stds: Sequence[Tensor]) -> Gaussian:
        mean = self._placed(torch.stack(list(means), 1), 0.0)
        std = self._placed(torch.stack(list(stds), 1), 1.0)
        return Gaussian(mean, std, 1 + len(self.head.event))

    def _placed(self, values: Tensor, rest: float) -> Tensor:  # (R, S, *E) -> (..., S, *E)
        """Values of the real places among all."""
        placed = values.new_full((*self.batch, *values.shape[1:]), rest)
        placed[self.real] = values
        return placed


@dataclass(frozen=True)
class PathResidual:
    """The distribution proportional to (P - Q)+ of paths, drawn by thinning P with 1 - min(1, Q / P).

    1 / TV(P, Q) tries are expected, so with the chance TV that a path was refused one per refusal
    tested. They are made side by side, a few at first, then twice as many in each turn: a walk of
    several costs little more than one. Raises ValueError after `most_tries`: the two distributions
    are then equal to rounding, and the residual does not exist.
    """

    p: PathDistribution
    q: PathDistribution
    most_tries: int = 1 << 14

    @property
    def batch(self) -> torch.Size:
        return self.p.batch

    def sample(self, keys: Keys) -> Tensor:  # (R,) -> (R, S, *E)
        paths = self.p._placed(keys.normal(self.p.states, *self.p.head.event)[self.p.real], 0.0)
        left = self.p.real.nonzero().squeeze(1)
        made = 0
        while len(left):
            if made >= self.most_tries:
                raise ValueError(
                    f"{made} tries found no path of the residual of two distributions: they are equal to "
                    "rounding, and a refusal is as rare as the tries are many; use another seed, "
                    "or compute in a wider dtype"
                )
            tries = min(max(made, _FIRST), _WIDEST)
            found, hit = self._tried(left, keys, range(made, made + tries))
            done = hit.any(-1)
            first = hit.int().argmax(-1)
            paths[left[done]] = found[torch.arange(len(left), device=left.device), first][done]
            left, made = left[~done], made + tries
        return paths

    def _tried(self, rows: Tensor, keys: Keys, numbers: range) -> tuple[Tensor, Tensor]:
        """Candidates (r, n, S, *E), and which of them are kept (r, n)."""
        own = Keys(keys.key[rows])
        several = Keys(torch.stack([own.split(2 * number).key for number in numbers], 1))
        coin = torch.stack([own.split(2 * number + 1).uniform() for number in numbers], 1)
        wide = rows[:, None].expand(-1, len(numbers))
        p, q = self.p[wide], self.q[wide]
        paths = p.sample(several)
        ratio = (q.log_prob(paths) - p.log_prob(paths)).clamp_max(0).exp()
        return paths, coin >= ratio


def check_random(kernel: GaussianKernel) -> None:
    """Refuse a sampler with silent steps. Raises ValueError."""
    if not all(kernel.is_random):
        silent = [index for index, noisy in enumerate(kernel.is_random) if not noisy]
        raise ValueError(
            f"the head adds no noise in step {silent[0]} of {kernel.steps}, so its paths have no "
            "density to compare; give last_noise=True, a sampler that keeps the noise of its last "
            "step, or use a recipe that compares none"
        )


def _among(values: Tensor, where: Tensor) -> Tensor:  # (R, ...), (B, M) -> (B, M, ...)
    placed = values.new_zeros(*where.shape, *values.shape[1:])
    placed[where] = values
    return placed
