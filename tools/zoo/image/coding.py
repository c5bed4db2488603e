"""Teach the picture part of Janus: a continuous autoencoder first, then codes for what it sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from einops import repeat
from torch import Tensor
from torch.nn import functional

from mmspec.training.fitting import Course, Fall, chunks, fit, shuffled
from mmspec.zoo import boards
from mmspec.zoo.boards import arranged, crowds
from mmspec.zoo.scene import BOARD, Scene, tiled
from tools.zoo.image.models import CODES, PIXELS, SIDE

_DISTURBANCE = 0.12  # noise on the axes of unit latents, about as far as the nearest code
_NUMBERS = 1 << 46  # scenes come from seeds of their own
_BATCH, _AT_ONCE = 8, 64
_ROUNDS, _LOOKED_AT = 20, 1024  # of k-means: rounds, and pictures
_COMMITMENT = 0.1  # how much it costs to see what is far from the nearest code
_MEMORY = 0.98  # share of a code that stays, with every batch
_CALLED_FOR = 6.0  # how much a place counts where something stands: grounds may be rough


@dataclass(frozen=True)
class Shown:
    """Pictures (n, 3, P, P) from -1 to 1, and how much each of their codes counts (n, 9, 9)."""

    images: Tensor
    weights: Tensor


def learn_pictures(coder: Any, shown: Shown, steps: int, course: Course) -> None:
    """Train a `JanusVQVAE` without its codes: unit latents, slightly disturbed, become pixels."""

    def loss_of(item: Shown) -> Tensor:
        seen = latents(coder, item.images)
        seen = functional.normalize(seen + _DISTURBANCE * torch.randn_like(seen), dim=1)
        return _missed(coder, seen, item)

    learnt = [p for p in coder.parameters() if p is not coder.quantize.embedding.weight]
    fit(learnt, batches(shown, course.seed), loss_of, Fall(steps, 3e-3), "see", course)


def learn_codes(coder: Any, shown: Shown, steps: int, course: Course) -> None:
    """Find the codes by k-means on unit latents, then train all with what the codes say of them.

    Gradients pass the codes straight through (van den Oord et al. 2017), and codes follow the
    means of what is nearest to them.
    """
    book = coder.quantize.embedding.weight.requires_grad_(False)
    book.copy_(_centres(coder, shown, course.seed))
    sums = book.clone()

    def loss_of(item: Shown) -> Tensor:
        seen = latents(coder, item.images)
        nearest = _nearest(book, seen.detach())
        said = book[nearest].permute(0, 3, 1, 2)
        apart = (said - seen).square().sum(1).mean()
        straight = seen + (said - seen).detach()
        flat = seen.detach() * item.weights[:, None]
        flat = flat.permute(0, 2, 3, 1).flatten(0, 2)
        sums.mul_(_MEMORY).index_add_(0, nearest.flatten(), flat, alpha=1 - _MEMORY)
        book.copy_(functional.normalize(sums, dim=-1))
        loss: Tensor = _missed(coder, straight, item) + _COMMITMENT * apart
        return loss

    learnt = [p for p in coder.parameters() if p is not book]
    fit(learnt, batches(shown, course.seed + 1), loss_of, Fall(steps, 2e-3), "paint", course)
    book.requires_grad_(True)


def latents(coder: Any, images: Tensor) -> Tensor:  # (B, 3, P, P) -> (B, d, 9, 9)
    """What the coder sees, of length one everywhere."""
    return functional.normalize(coder.quant_conv(coder.encoder(images)), dim=1)


@torch.no_grad()
def coded(coder: Any, images: Tensor) -> Tensor:  # (B, 3, P, P) -> (B, 81) int64
    """The nearest code for every patch of pictures."""
    return _nearest(coder.quantize.embedding.weight, latents(coder, images)).flatten(1)


def _nearest(book: Tensor, seen: Tensor) -> Tensor:  # -> (B, 9, 9) int64
    return torch.einsum("bdhw, kd -> bhwk", seen, book).argmax(-1)


def painted(coder: Any, seen: Tensor, images: Tensor) -> Tensor:  # -> (B, h, w)
    """How far the pictures painted from latents are from what they should be, at each code."""
    error = coder.decoder(coder.post_quant_conv(seen)) - images
    off = error.square() + 0.1 * error.abs()
    height, width = seen.shape[-2:]
    each: Tensor = functional.adaptive_avg_pool2d(off, (height, width)).mean(1)
    return each


def _missed(coder: Any, seen: Tensor, item: Shown) -> Tensor:  # -> ()
    return (painted(coder, seen, item.images) * item.weights).sum() / item.weights.sum()


def pictures(scenes: Sequence[Scene]) -> Tensor:  # -> (B, 3, P, P), from -1 to 1
    """Draw scenes as Janus sees them."""
    return boards.pictures(scenes, PIXELS)


def crowded(count: int, course: Course) -> Shown:
    """Pictures on tiles, with something in one to nine places."""
    generator = np.random.default_rng((course.seed, 7))
    source = scattered(_NUMBERS + (course.seed << 24), generator, BOARD**2)
    scenes = [tiled(scene, generator) for scene in islice(source, count)]
    turns = chunks(scenes, _AT_ONCE, "render", course.progress)
    images = torch.cat([pictures(part) for part in turns])
    return Shown(images, 1 + (_CALLED_FOR - 1) * taken(scenes).unflatten(1, (SIDE, SIDE)))


def batches(shown: Shown, seed: int) -> Iterator[Shown]:
    """A few of the pictures at a time, without end."""
    generator = np.random.default_rng((seed, 18))
    for picks in shuffled(len(shown.images), _BATCH, generator):
        yield Shown(shown.images[picks], shown.weights[picks])


def taken(scenes: Sequence[Scene], side: int = SIDE) -> Tensor:  # -> (n, side ** 2) floats
    """One for codes of the places where something stands, zero for all others."""
    is_there = (boards.boards(scenes)[..., 0] > 0).unflatten(-1, (BOARD, BOARD))
    across = side // BOARD
    codes: Tensor = repeat(is_there, "n h w -> n (h r w c)", r=across, c=across)
    return codes.float()


def scattered(number: int, generator: np.random.Generator, most: int) -> Iterator[Scene]:
    """Scenes with one to `most` things anywhere, as often as any other count."""
    for things in crowds(number):
        count = 1 + int(generator.integers(most))
        yield arranged(things, sorted(generator.permutation(BOARD**2)[:count]))


@torch.no_grad()
def _centres(coder: Any, shown: Shown, seed: int) -> Tensor:  # -> (K, d), of length one
    """Spherical k-means of what is seen in some of the pictures.

    A centre nearest to nothing moves to what is worst served.
    """
    images, weights = shown.images[:_LOOKED_AT], shown.weights[:_LOOKED_AT].flatten()
    seen = [latents(coder, part).permute(0, 2, 3, 1) for part in images.split(_AT_ONCE)]
    points = torch.cat(seen).flatten(0, 2)
    generator = torch.Generator().manual_seed(seed)
    centres = points[torch.multinomial(weights, CODES, generator=generator)]
    for _ in range(_ROUNDS):
        likeness, nearest = (points @ centres.T).max(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points * weights[:, None])
        is_idle = torch.bincount(nearest, minlength=len(centres)) == 0
        sums[is_idle] = points[likeness.argsort()[: int(is_idle.sum())]]
        centres = functional.normalize(sums, dim=-1)
    return centres
