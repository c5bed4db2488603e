"""Train MAR: mask most of an image, and denoise the masked tokens with the head.

After Li et al. 2024, with changes for small images and short training: any number of tokens may be
visible, the head predicts velocity, and latents are encoder outputs plus the noise that the decoder
was trained with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from mmspec.modalities.mar.checkpoints import LABELS
from mmspec.models.mar import MarForImageGeneration
from mmspec.models.mar_head import DiffusionHead, HeadGrid
from mmspec.training.fitting import CosineDecay, TrainingRun, fit, iterate_chunks, split_parameters
from mmspec.zoo.scene import BOARD, COLOURS, SHAPES, Scene, Thing
from mmspec.zoo.scene_tensors import render_images
from tools.zoo.mar.models import PATCH

DRAWS = 2  # of the head's noise per token
DISTURBANCE = 0.1  # std of the noise added to latents, as in the training of the decoder
_AT_ONCE = 64  # images per batch of encoding
_DROPOUT = 0.1  # share of null classes, for guidance
_SHIFT = 0.06  # largest displacement from the middle of a cell, in cells


@dataclass(frozen=True)
class TokenPool:
    """Images of one thing each: tokens (N, L, C) without noise, and classes (N,)."""

    tokens: Tensor
    classes: Tensor
    noise: float  # std of the noise to add


def sample_scenes(count: int, seed: int) -> Iterator[tuple[int, Scene]]:
    """Classes and scenes, uniform over classes and cells."""
    generator = np.random.default_rng((seed, 8))
    for index in range(count):
        number, place = index % len(LABELS), index // len(LABELS) % BOARD**2
        yield number, single_thing_scene(number, place, generator)


def single_thing_scene(number: int, place: int, generator: np.random.Generator) -> Scene:
    """A scene of one large thing of a class, near the middle of a cell."""
    shape, colour = divmod(number, len(COLOURS))
    x, y = (float(v) for v in generator.uniform(-_SHIFT, _SHIFT, 2))
    row, column = divmod(place, BOARD)
    return Scene((Thing(SHAPES[shape], COLOURS[colour], "large", row, column, shift=(x, y)),))


@torch.no_grad()
def encode_pool(
    autoencoder: Any, count: int, run: TrainingRun, scale: float | None = None
) -> tuple[TokenPool, float]:
    """Encoded images and their scale (default: unit variance including noise)."""
    numbers, scenes = zip(*sample_scenes(count, run.seed), strict=True)
    chunks = iterate_chunks(scenes, _AT_ONCE, "encode", run.progress)
    latents = torch.cat([autoencoder.encoder(render_images(part)) for part in chunks])
    if scale is None:
        scale = round(float(1 / (latents.var() + DISTURBANCE**2).sqrt()), 4)
    classes = torch.tensor(numbers)
    return TokenPool(patchify(latents * scale), classes, DISTURBANCE * scale), scale


def patchify(latents: Tensor) -> Tensor:  # (B, C, H, W) -> (B, L, C x PATCH x PATCH)
    """The inverse of `MarForImageGeneration.picture`."""
    return rearrange(latents, "b c (y p) (x q) -> b (y x) (c p q)", p=PATCH, q=PATCH)


@dataclass(frozen=True)
class MaskedExample:
    """Images with masked tokens at `positions`, the same number in every row."""

    tokens: Tensor  # (B, L, C)
    shown: Tensor  # (B, L) bool
    positions: Tensor  # (B, M)
    classes: Tensor  # (B,)


def example_batches(pool: TokenPool, batch: int, seed: int) -> Iterator[MaskedExample]:
    """Infinite batches, each with new noise, order and number of visible tokens."""
    generator = torch.Generator().manual_seed(seed)
    cells = pool.tokens.shape[1]
    while True:
        for picks in torch.randperm(len(pool.classes), generator=generator).split(batch):
            clean, classes = pool.tokens[picks], pool.classes[picks].clone()
            noise = torch.randn(clean.shape, generator=generator)
            is_dropped = torch.rand(len(picks), generator=generator) < _DROPOUT
            classes[is_dropped] = len(LABELS)
            order = torch.rand(len(picks), cells, generator=generator).argsort(-1)
            count = int(torch.randint(cells, (), generator=generator))
            shown = order.argsort(-1) < count
            yield MaskedExample(clean + pool.noise * noise, shown, order[:, count:], classes)


def train_generation(
    model: MarForImageGeneration,
    examples: Iterator[MaskedExample],
    decay: CosineDecay,
    run: TrainingRun,
) -> None:
    """Train a model on images: velocities of its head and, with those detached, variances."""
    schedule = HeadSchedule.of(model.config.base_steps)

    def loss_of(example: MaskedExample) -> Tensor:
        conditions = gather_tokens(
            model(example.tokens, example.shown, example.classes), example.positions
        )
        return head_loss(
            model.head, schedule, gather_tokens(example.tokens, example.positions), conditions
        )

    matrices, others = split_parameters(layers(model), model.parameters())
    fit(others, examples, loss_of, decay, "draw", run, matrices)


def layers(model: MarForImageGeneration) -> nn.ModuleList:
    """The layers of encoder and decoder, and the blocks of the head."""
    return nn.ModuleList([*model.encoder, *model.decoder, *model.head.blocks])


def gather_tokens(values: Tensor, positions: Tensor) -> Tensor:  # (B, L, D), (B, M) -> (B M, D)
    """Gather the values at positions."""
    return values.gather(1, positions[..., None].expand(-1, -1, values.shape[-1])).flatten(0, 1)


@dataclass(frozen=True)
class HeadSchedule:
    """Tables (T,) of the head's diffusion steps by time, data first."""

    alpha: Tensor
    sigma: Tensor
    to_clean: Tensor  # weight of the clean token in the mean of the previous state
    small: Tensor  # log variances between which the head interpolates
    large: Tensor

    @classmethod
    def of(cls, steps: int) -> HeadSchedule:
        grid = HeadGrid.cosine(steps, steps)
        alpha, sigma = (table.flip(0)[1:] for table in (grid.kernel.alpha, grid.kernel.sigma))
        small, large = grid.low.flip(0), grid.high.flip(0)
        before = torch.cat((torch.ones(1), alpha[:-1]))
        weight = before * large.exp() / sigma**2
        return cls(*(t.float() for t in (alpha, sigma, weight, small, large)))


def head_loss(
    head: DiffusionHead, schedule: HeadSchedule, clean: Tensor, conditions: Tensor
) -> Tensor:
    """Squared error of the velocity, and the bound that trains variances (Nichol & Dhariwal 2021).

    `clean` (R, C) given `conditions` (R, D); every token is sampled at `DRAWS` times.
    """
    clean, conditions = clean.repeat(DRAWS, 1), conditions.repeat(DRAWS, 1)
    time = torch.randint(len(schedule.alpha), (len(clean),))
    noise = torch.randn_like(clean)
    alpha, sigma = schedule.alpha[time, None], schedule.sigma[time, None]
    expected = alpha * noise - sigma * clean
    velocity, spread = head(alpha * clean + sigma * noise, time, conditions).chunk(2, -1)
    share = (spread + 1) / 2
    small, large = schedule.small[time, None], schedule.large[time, None]
    wide = share * large + (1 - share) * small
    error = (schedule.to_clean[time, None] * sigma * (velocity.detach() - expected)).square()
    bound = 0.5 * (wide - small - 1 + (small.exp() + error) / wide.exp())
    first = 0.5 * (wide + error / wide.exp())  # the last step has no variance
    bound = torch.where(time[:, None] == 0, first, bound)
    return functional.mse_loss(velocity, expected) + bound.mean()
