"""Teach MAR to draw: hide most of a picture and let the head denoise what is hidden.

After Li et al. 2024, with differences that suit small pictures and short training: any number of
tokens may be shown rather than a few, the head predicts velocity, and latents are drawn around what
the encoder says with the disturbance that the decoder was trained with.
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

from mmspec.modalities.mar.held_out import LABELS
from mmspec.models.mar import MarForImageGeneration
from mmspec.models.mar_head import DiffusionHead, HeadGrid
from mmspec.training.fitting import Course, Fall, chunks, divided, fit
from mmspec.zoo.boards import pictures
from mmspec.zoo.scene import BOARD, COLOURS, SHAPES, Scene, Thing
from tools.zoo.mar.models import PATCH

DRAWS = 2  # of the head's noise per token
DISTURBANCE = 0.1  # std of latents around what the encoder says, as its decoder knows it
_AT_ONCE = 64  # pictures
_SILENCE = 0.1  # how often a model is told no class, for guidance
_SHIFT = 0.06  # largest displacement from the middle of a cell, in cells


@dataclass(frozen=True)
class TokenPool:
    """Pictures of one thing each: tokens (N, L, C) without noise, and classes (N,)."""

    tokens: Tensor
    classes: Tensor
    noise: float  # std of the latents around these


def scenes(count: int, seed: int) -> Iterator[tuple[int, Scene]]:
    """Classes and pictures, all classes and places equally often."""
    generator = np.random.default_rng((seed, 8))
    for index in range(count):
        number, place = index % len(LABELS), index // len(LABELS) % BOARD**2
        yield number, alone(number, place, generator)


def alone(number: int, place: int, generator: np.random.Generator) -> Scene:
    """One large thing of a class, somewhere near the middle of a cell."""
    shape, colour = divmod(number, len(COLOURS))
    x, y = (float(v) for v in generator.uniform(-_SHIFT, _SHIFT, 2))
    row, column = divmod(place, BOARD)
    return Scene((Thing(SHAPES[shape], COLOURS[colour], "large", row, column, shift=(x, y)),))


@torch.no_grad()
def encoded_pool(
    autoencoder: Any,
    count: int,
    course: Course,
    scale: float | None = None,
) -> tuple[TokenPool, float]:
    """Encoded pictures and their scale: if not given, that of unit variance, noise included."""
    numbers, shown = zip(*scenes(count, course.seed), strict=True)
    turns = chunks(shown, _AT_ONCE, "encode", course.progress)
    latents = torch.cat([autoencoder.encoder(pictures(part)) for part in turns])
    if scale is None:
        scale = round(float(1 / (latents.var() + DISTURBANCE**2).sqrt()), 4)
    classes = torch.tensor(numbers)
    return TokenPool(tokens(latents * scale), classes, DISTURBANCE * scale), scale


def tokens(latents: Tensor) -> Tensor:  # (B, C, H, W) -> (B, L, C x PATCH x PATCH)
    """What `MarForImageGeneration.picture` lays out."""
    return rearrange(latents, "b c (y p) (x q) -> b (y x) (c p q)", p=PATCH, q=PATCH)


@dataclass(frozen=True)
class MaskedLesson:
    """Pictures with some tokens hidden; `places` are those, in every row as many."""

    tokens: Tensor  # (B, L, C)
    shown: Tensor  # (B, L) bool
    places: Tensor  # (B, M)
    classes: Tensor  # (B,)


def lessons(pool: TokenPool, batch: int, seed: int) -> Iterator[MaskedLesson]:
    """Batches without end; noise, order and how much is shown are new each time."""
    generator = torch.Generator().manual_seed(seed)
    cells = pool.tokens.shape[1]
    while True:
        for picks in torch.randperm(len(pool.classes), generator=generator).split(batch):
            clean, classes = pool.tokens[picks], pool.classes[picks].clone()
            noise = torch.randn(clean.shape, generator=generator)
            silent_ = torch.rand(len(picks), generator=generator) < _SILENCE
            classes[silent_] = len(LABELS)
            turns = torch.rand(len(picks), cells, generator=generator).argsort(-1)
            count = int(torch.randint(cells, (), generator=generator))
            shown = turns.argsort(-1) < count
            yield MaskedLesson(clean + pool.noise * noise, shown, turns[:, count:], classes)


def learn_to_draw(
    model: MarForImageGeneration,
    taught: Iterator[MaskedLesson],
    fall: Fall,
    course: Course,
) -> None:
    """Train a model on pictures: what its head says and, with that frozen, its variances."""
    schedule = HeadSchedule.of(model.config.base_steps)

    def loss_of(lesson: MaskedLesson) -> Tensor:
        conditions = hidden(model(lesson.tokens, lesson.shown, lesson.classes), lesson.places)
        return head_loss(model.head, schedule, hidden(lesson.tokens, lesson.places), conditions)

    matrices, others = divided(layers(model), model.parameters())
    fit(others, taught, loss_of, fall, "draw", course, matrices)


def layers(model: MarForImageGeneration) -> nn.ModuleList:
    """What is repeated: the layers of encoder and decoder, and the blocks of the head."""
    return nn.ModuleList([*model.encoder, *model.decoder, *model.head.blocks])


def hidden(values: Tensor, places: Tensor) -> Tensor:  # (B, L, D), (B, M) -> (B M, D)
    """What is at the places."""
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1])).flatten(0, 1)


@dataclass(frozen=True)
class HeadSchedule:
    """The tables of the head's own steps, by time: data first; (T,)."""

    alpha: Tensor
    sigma: Tensor
    to_clean: Tensor  # weight of the clean token in the mean of the state before
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

    `clean` (R, C) under `conditions` (R, D); every token is met at `DRAWS` times.
    """
    clean, conditions = clean.repeat(DRAWS, 1), conditions.repeat(DRAWS, 1)
    time = torch.randint(len(schedule.alpha), (len(clean),))
    noise = torch.randn_like(clean)
    alpha, sigma = schedule.alpha[time, None], schedule.sigma[time, None]
    wanted = alpha * noise - sigma * clean
    told, spread = head(alpha * clean + sigma * noise, time, conditions).chunk(2, -1)
    share = (spread + 1) / 2
    small, large = schedule.small[time, None], schedule.large[time, None]
    wide = share * large + (1 - share) * small
    apart = (schedule.to_clean[time, None] * sigma * (told.detach() - wanted)).square()
    bound = 0.5 * (wide - small - 1 + (small.exp() + apart) / wide.exp())
    first = 0.5 * (wide + apart / wide.exp())  # the last step has no variance to match
    bound = torch.where(time[:, None] == 0, first, bound)
    return functional.mse_loss(told, wanted) + bound.mean()
