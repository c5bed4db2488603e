"""The diffusion head of MAR: denoises one latent token with a small conditional network.

Li et al. 2024 ("Autoregressive image generation without vector quantization"): residual blocks with
adaptive layer norm, conditioned on the timestep and the transformer's output. The head predicts
noise (or velocity, for models trained so) and interpolates the variance of each step between two
bounds (Nichol & Dhariwal 2021, eq. 15). Sampling uses a subset of the steps of a cosine schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.distributions.kernels import GaussianKernel, at_step
from mmspec.targets.continuous.denoising import Prediction
from mmspec.targets.continuous.patches import PatchSettings

FREQUENCIES = 256
PREDICTIONS = ("noise", "velocity")
_STEEPEST = 0.999  # largest beta
_OFFSET = 0.008  # keeps the first betas away from 0


class DiffusionHead(nn.Module):
    """Noise and variance (R, 2 C) in states (R, C), at times (R,), under conditions (R, D)."""

    def __init__(self, channels: int, condition: int, width: int, depth: int) -> None:
        super().__init__()
        self.channels = channels
        self.time_in = nn.Linear(FREQUENCIES, width)
        self.time_out = nn.Linear(width, width)
        self.condition = nn.Linear(condition, width)
        self.input = nn.Linear(channels, width)
        self.blocks = nn.ModuleList(HeadBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, 2 * channels)

    def forward(self, states: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        return self.denoise(states, self.embed_time(time), condition, self.modulations())

    def embed_time(self, time: Tensor) -> Tensor:  # (R,) -> (R, W)
        """Embed the timestep."""
        inner: Tensor = self.time_in(sinusoidal_embedding(time).to(self.time_in.weight.dtype))
        embedded: Tensor = self.time_out(functional.silu(inner))
        return embedded

    def modulations(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of all modulations, for one matrix product: it is much faster than many.

        Order: shift, scale and gate of each block, then shift and scale of the output.
        """
        blocks: Any = self.blocks
        parts = [*(block.modulation for block in blocks), self.modulation]
        return torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])

    def denoise(
        self, states: Tensor, time: Tensor, condition: Tensor, modulations: tuple[Tensor, Tensor]
    ) -> Tensor:
        """As `forward`, with precomputed time embeddings and modulations."""
        given = functional.silu(time + self.condition(condition))
        parts = functional.linear(given, *modulations).split(self.input.out_features, -1)
        x = self.input(states)
        for index, block in enumerate(self.blocks):
            x = block(x, *parts[3 * index : 3 * index + 3])
        output: Tensor = self.output(torch.addcmul(parts[-2], self.norm(x), 1 + parts[-1]))
        return output


class HeadBlock(nn.Module):
    """A residual block with adaptive layer norm: shift, scale and gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        self.modulation = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        inner = self.fc1(torch.addcmul(shift, self.norm(x), 1 + scale))
        return torch.addcmul(x, gate, self.fc2(functional.silu(inner)))


def sinusoidal_embedding(time: Tensor) -> Tensor:  # (R,) -> (R, FREQUENCIES)
    """Cosines and sines of the timestep at geometric frequencies."""
    half = FREQUENCIES // 2
    index = torch.arange(half, device=time.device, dtype=torch.float32)
    angle = time[:, None].float() * (-math.log(10_000) * index / half).exp()
    return torch.cat((angle.cos(), angle.sin()), -1)


@dataclass(frozen=True)
class HeadGrid:
    """The timesteps of sampling, noisiest first; tables (T,)."""

    kernel: GaussianKernel
    times: Tensor  # timesteps of the network
    low: Tensor  # log variances that the head interpolates
    high: Tensor

    @classmethod
    def cosine(cls, base: int, steps: int, last_noise: bool = False) -> HeadGrid:
        """Select `steps` of `base` steps, evenly spaced (Nichol & Dhariwal 2021, section 4).

        The last step adds noise only with `last_noise`: as predicted, between beta and the variance
        of the step before (a std of 0.006 for 100 steps).
        """
        if not 2 <= steps <= base:
            raise ValueError(
                f"head_steps={steps} do not fit the {base} training steps of the head; give 2 to "
                f"{base}"
            )
        stride = (base - 1) / (steps - 1)
        index = torch.tensor([round(step * stride) for step in range(steps)])
        share = _shares(base)[index]  # of the signal's variance, falling
        before = torch.cat((torch.ones(1, dtype=torch.float64), share[:-1]))
        beta = 1 - share / before
        small = beta * (1 - before) / (1 - share)
        small = torch.cat((small[1:2], small[1:]))  # that of the last step would be 0
        clean = torch.tensor([1.0, 0.0], dtype=torch.float64)
        alpha = torch.cat((share.flip(0).sqrt(), clean[:1]))
        sigma = torch.cat(((1 - share).flip(0).sqrt(), clean[1:]))
        kernel = GaussianKernel.ancestral(alpha, sigma)
        if last_noise:
            std = torch.cat((kernel.std[:-1], small[:1].sqrt()))
            kernel = replace(kernel, std=std)
        return cls(kernel, index.flip(0), small.log().flip(0), beta.log().flip(0))


def _shares(base: int) -> Tensor:  # (base,) float64
    """Cumulative products of 1 - beta of the cosine schedule."""
    time = torch.arange(base + 1, dtype=torch.float64) / base
    signal = ((time + _OFFSET) / (1 + _OFFSET) * math.pi / 2).cos() ** 2
    beta = (1 - signal[1:] / signal[:-1]).clamp_max(_STEEPEST)
    return (1 - beta).cumprod(0)


@dataclass(frozen=True)
class HeadSampler:
    """A head with its sampler: a `Head` of paths.

    Guidance combines predicted noise, eps = u + s (c - u), and keeps the conditional variance.
    Velocities are combined alike, as they are linear functions of the noise in a given state.
    """

    network: Any  # `DiffusionHead`
    base: int
    plan: PatchSettings
    prediction: str = "noise"  # one of PREDICTIONS

    @cached_property
    def grid(self) -> HeadGrid:
        return HeadGrid.cosine(self.base, self.plan.head_steps, self.plan.last_noise)

    @property
    def kernel(self) -> GaussianKernel:
        return self.grid.kernel

    @property
    def event(self) -> torch.Size:
        return torch.Size([self.network.channels])

    @cached_property
    def step_inputs(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Time embeddings of all steps, and modulations."""
        network, weight = self.network, self.network.input.weight
        return network.embed_time(self.grid.times.to(weight.device)), network.modulations()

    def predict(self, states: Tensor, step: Tensor, condition: Tensor, scale: Tensor) -> Prediction:
        branches = condition.shape[1]
        times, modulations = self.step_inputs
        inputs, embedded = states.to(condition.dtype), times[step]
        if branches > 1:
            inputs, embedded = inputs.repeat(branches, 1), embedded.repeat(branches, 1)
        given = condition.transpose(0, 1).flatten(0, 1)  # branch major
        output = self.network.denoise(inputs, embedded, given, modulations).to(states.dtype)
        predicted, spread = output.unflatten(0, (branches, len(states))).chunk(2, -1)
        conditional = predicted[0]
        joined = (
            conditional
            if branches == 1
            else predicted[1] + scale[:, None] * (conditional - predicted[1])
        )
        share = (spread[0] + 1) / 2
        low, high = (at_step(table, step, states) for table in (self.grid.low, self.grid.high))
        std = (0.5 * (share * high + (1 - share) * low)).exp() * self.plan.temperature
        velocity = self.prediction == "velocity"
        clean = self.kernel.clean_from_velocity if velocity else self.kernel.clean_from_noise
        return Prediction(clean(states, joined, step), std)
