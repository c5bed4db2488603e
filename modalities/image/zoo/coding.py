"""Teach the picture part of Janus: a continuous autoencoder first, then codes for what it sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mmspec.modalities.image.zoo.models import CODES, PIXELS, SIDE
from mmspec.training.fitting import Course, Fall, fit
from mmspec.zoo import boards
from mmspec.zoo.boards import arranged, crowds
from mmspec.zoo.drawing import PAPER
from mmspec.zoo.scene import BOARD, Scene

_DISTURBANCE = 0.12  # noise on the axes of unit latents, about as far as the nearest code
_NUMBERS = 1 << 46  # scenes come from seeds of their own
_BATCH = 8
_ROUNDS = 20  # of k-means
_BLANK = 0.05  # largest difference to paper of a pixel of a blank patch
_COMMITMENT = 0.1  # how much it costs to see what is far from the nearest code
_MEMORY = 0.98  # share of a code that stays, with every batch


def learn_pictures(coder: Any, steps: int, course: Course) -> None:
    """Train a `JanusVQVAE` without its codes: unit latents, slightly disturbed, become pixels."""

    def loss_of(images: Tensor) -> Tensor:
        seen = latents(coder, images)
        seen = functional.normalize(seen + _DISTURBANCE * torch.randn_like(seen), dim=1)
        return painted(coder, seen, images)

    learnt = [p for p in coder.parameters() if p is not coder.quantize.embedding.weight]
    fit(learnt, crowded(_BATCH, course.seed), loss_of, Fall(steps, 3e-3), "see", course)


def learn_codes(coder: Any, steps: int, pool: int, course: Course) -> None:
    """Find the codes by k-means on unit latents, then train all with what the codes say of them.

    Gradients pass the codes straight through (van den Oord et al. 2017), and codes follow the
    means of what is nearest to them. The first code is for all blank patches: it leaves the others
    for things, and who draws need not guess among many that mean the same.
    """
    book = coder.quantize.embedding.weight.requires_grad_(False)
    book.copy_(_centres(coder, pool, course.seed))
    sums = book.clone()

    def loss_of(images: Tensor) -> Tensor:
        seen = latents(coder, images)
        nearest = _nearest(book, seen.detach(), images)
        said = book[nearest].permute(0, 3, 1, 2)
        apart = (said - seen).square().sum(1).mean()
        straight = seen + (said - seen).detach()
        flat = seen.detach().permute(0, 2, 3, 1).flatten(0, 2)
        sums.mul_(_MEMORY).index_add_(0, nearest.flatten(), flat, alpha=1 - _MEMORY)
        book.copy_(functional.normalize(sums, dim=-1))
        loss: Tensor = painted(coder, straight, images) + _COMMITMENT * apart
        return loss

    learnt = [p for p in coder.parameters() if p is not book]
    fit(learnt, crowded(_BATCH, course.seed + 1), loss_of, Fall(steps, 2e-3), "paint", course)
    book.requires_grad_(True)


def latents(coder: Any, images: Tensor) -> Tensor:  # (B, 3, P, P) -> (B, d, 9, 9)
    """What the coder sees, of length one everywhere."""
    return functional.normalize(coder.quant_conv(coder.encoder(images)), dim=1)


@torch.no_grad()
def coded(coder: Any, images: Tensor) -> Tensor:  # (B, 3, P, P) -> (B, 81) int64
    """The code for every patch of pictures: the first for a blank one, else the nearest."""
    return _nearest(coder.quantize.embedding.weight, latents(coder, images), images).flatten(1)


def _nearest(book: Tensor, seen: Tensor, images: Tensor) -> Tensor:  # -> (B, 9, 9) int64
    nearest = torch.einsum("bdhw, kd -> bhwk", seen, book).argmax(-1)
    return nearest.masked_fill(is_blank(images), 0)


def painted(coder: Any, seen: Tensor, images: Tensor) -> Tensor:  # -> ()
    """How far the pictures painted from latents are from what they should be."""
    error: Tensor = coder.decoder(coder.post_quant_conv(seen)) - images
    return error.square().mean() + 0.1 * error.abs().mean()


def pictures(scenes: Sequence[Scene]) -> Tensor:  # -> (B, 3, P, P), from -1 to 1
    """Draw scenes as Janus sees them."""
    return boards.pictures(scenes, PIXELS)


def is_blank(images: Tensor) -> Tensor:  # (B, 3, P, P) -> (B, 9, 9) bool
    """Which patches of pictures are nothing but paper."""
    paper = torch.tensor(PAPER).div(127.5).sub(1).view(3, 1, 1)
    ink = (images - paper).abs().amax(1, keepdim=True)
    blank: Tensor = functional.max_pool2d(ink, PIXELS // SIDE)[:, 0] < _BLANK
    return blank


def crowded(batch: int, seed: int) -> Iterator[Tensor]:
    """Pictures with something in one to nine places."""
    generator = np.random.default_rng((seed, 7))
    source = scattered(_NUMBERS + (seed << 24), generator, BOARD**2)
    while True:
        yield pictures(list(islice(source, batch)))


def scattered(number: int, generator: np.random.Generator, most: int) -> Iterator[Scene]:
    """Scenes with one to `most` things anywhere, as often as any other count."""
    for things in crowds(number):
        count = 1 + int(generator.integers(most))
        yield arranged(things, sorted(generator.permutation(BOARD**2)[:count]))


@torch.no_grad()
def _centres(coder: Any, pool: int, seed: int) -> Tensor:  # -> (K, d), of length one
    """The mean of blank patches, and spherical k-means of what is seen in all others.

    A centre that nobody is nearest to moves to the latent worst served.
    """
    parts, papers = [], []
    for images in islice(crowded(_BATCH, seed + 2), pool // _BATCH):
        seen, blank = latents(coder, images).permute(0, 2, 3, 1), is_blank(images)
        parts.append(seen[~blank])
        papers.append(seen[blank])
    points, paper = torch.cat(parts), torch.cat(papers).mean(0, keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    centres = points[torch.randperm(len(points), generator=generator)[: CODES - 1]]
    for _ in range(_ROUNDS):
        likeness, nearest = (points @ centres.T).max(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        is_idle = torch.bincount(nearest, minlength=len(centres)) == 0
        sums[is_idle] = points[likeness.argsort()[: int(is_idle.sum())]]
        centres = functional.normalize(sums, dim=-1)
    return torch.cat([functional.normalize(paper, dim=-1), centres])
