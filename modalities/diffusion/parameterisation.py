"""Convert outputs of a denoising network to predictions of the clean sample.

Networks predict the noise, the clean sample, a velocity or a flow. The clean sample is linear in
state and output for all of them, given by two tables over the steps, before clipping and
thresholding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mmspec.distributions.kernels import GaussianKernel, at_step
from mmspec.targets.continuous.denoising import Prediction

KINDS = ("epsilon", "sample", "v_prediction", "flow_prediction")


class Limit(Protocol):
    """Limits predicted clean samples to their range, per row."""

    def __call__(self, clean: Tensor) -> Tensor: ...  # (R, *E) -> (R, *E)


@dataclass(frozen=True)
class Clip:
    """Clip to [-max_value, max_value]."""

    max_value: float

    def __call__(self, clean: Tensor) -> Tensor:
        return clean.clamp(-self.max_value, self.max_value)


@dataclass(frozen=True)
class DynamicThreshold:
    """Clip at a quantile of the row, then scale to [-1, 1] (Imagen, Saharia et al. 2022, 2.3)."""

    quantile: float
    max_value: float

    def __call__(self, clean: Tensor) -> Tensor:
        bound = clean.flatten(1).abs().quantile(self.quantile, dim=1).clamp(1, self.max_value)
        bound = bound.reshape(-1, *(1,) * (clean.dim() - 1))
        return clean.clamp(-bound, bound) / bound


@dataclass(frozen=True)
class PredictedStd:
    """The std of a step from a second half of the network's output (Nichol & Dhariwal 2021).

    `low` and `high` (N,) are the variances between which the output interpolates geometrically,
    eq. (15); without them it is the variance itself.
    """

    low: Tensor | None = None
    high: Tensor | None = None

    def __call__(self, output: Tensor, step: Tensor) -> Tensor:  # (R, *E), (R,) -> (R, *E)
        if self.low is None or self.high is None:
            return output.sqrt()
        share = (output + 1) / 2
        low, high = (at_step(table.log(), step, output) for table in (self.low, self.high))
        return (0.5 * (share * high + (1 - share) * low)).exp()


@dataclass(frozen=True)
class PredictionConverter:
    """Converts network outputs to predictions: clean = from_state x + from_output output.

    `rest` (N,) is for samplers that limit the clean sample but keep the unlimited noise (DDIM):
    b clean' = b clean + rest (limited - clean) defines a clean' with the same mean.
    """

    from_state: Tensor  # (N,)
    from_output: Tensor  # (N,)
    limit: Limit | None = None
    rest: Tensor | None = None  # (N,), already divided by b
    std: PredictedStd | None = None
    ignores_variance: bool = False  # whether the output has an unused second half

    @classmethod
    def of(cls, kind: str, alpha: Tensor, sigma: Tensor) -> PredictionConverter:  # (N,) each
        """Outputs of a `kind` of KINDS, for states alpha x0 + sigma eps.

        States need not have variance 1: input and output of a network that predicts noise or
        velocity refer to the state scaled to variance 1.
        """
        alpha, sigma = alpha.double(), sigma.double()
        if kind == "epsilon":
            if bool((alpha == 0).any()):
                raise ValueError(
                    "the first state is pure noise (zero terminal SNR), where an epsilon "
                    "prediction does not determine the clean sample; use "
                    'prediction_type="v_prediction" or timestep_spacing="leading"'
                )
            return cls(1 / alpha, -sigma / alpha)
        if kind == "sample":
            return cls(torch.zeros_like(alpha), torch.ones_like(alpha))
        if kind == "v_prediction":
            scale = alpha**2 + sigma**2
            return cls(alpha / scale, -sigma / scale.sqrt())
        if kind == "flow_prediction":
            return cls(torch.ones_like(alpha), -sigma)
        raise ValueError(f"prediction_type={kind!r} must be one of {', '.join(KINDS)}")

    def __call__(
        self, output: Tensor, states: Tensor, step: Tensor, kernel: GaussianKernel
    ) -> Prediction:
        output = output.to(states.dtype)
        std = None
        if self.ignores_variance:
            output, _ = _halves(output, states)
        elif self.std is not None:
            output, spread = _halves(output, states)
            noisy = at_step(kernel.std, step, states) > 0
            std = torch.where(noisy, self.std(spread, step), torch.zeros_like(states))
        if output.shape != states.shape:
            raise ValueError(
                f"the network's output has shape {tuple(output.shape)}, its states have "
                f"{tuple(states.shape)}; a network that also predicts a variance needs a scheduler "
                'with variance_type="learned" or "learned_range", or its second half cut off'
            )
        clean = at_step(self.from_state, step, states) * states
        clean = clean + at_step(self.from_output, step, states) * output
        if self.limit is not None:
            limited = self.limit(clean)
            if self.rest is None:
                clean = limited
            else:
                clean = clean + at_step(self.rest, step, states) * (limited - clean)
        return Prediction(clean, std)


def _halves(output: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Split an output into prediction and variance along the channel axis."""
    channels = states.shape[1]
    if output.shape[1] != 2 * channels:
        raise ValueError(
            f"the scheduler expects a predicted variance, {2 * channels} output channels, but the "
            f'network has {output.shape[1]}; set variance_type="fixed_small"'
        )
    return output[:, :channels], output[:, channels:]
