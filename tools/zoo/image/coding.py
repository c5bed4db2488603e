"""Train the autoencoder of Janus: first with continuous latents, then with a codebook."""

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

from mmspec.training.fitting import CosineDecay, TrainingRun, fit, iterate_chunks, shuffle_batches
from mmspec.zoo import scene_tensors as boards
from mmspec.zoo.scene import BOARD, Scene, add_tiles
from mmspec.zoo.scene_tensors import arrange_things, iterate_thing_groups
from tools.zoo.image.models import CODES, PIXELS, SIDE

_DISTURBANCE = 0.12  # noise on the axes of unit latents, about as far as the nearest code
_NUMBERS = 1 << 46  # first scene seed, different for every stage
_BATCH, _AT_ONCE = 8, 64
_ROUNDS, _KMEANS_IMAGES = 20, 1024  # of k-means
_COMMITMENT = 0.1  # weight of the distance between latents and their codes
_DECAY = 0.98  # of the moving average of codes, per batch
_OBJECT_WEIGHT = 6.0  # weight of cells with an object; backgrounds need less precision


@dataclass(frozen=True)
class WeightedImages:
    """Images (n, 3, P, P) from -1 to 1, and loss weights of their codes (n, 9, 9)."""

    images: Tensor
    weights: Tensor


def train_autoencoder(coder: Any, data: WeightedImages, steps: int, run: TrainingRun) -> None:
    """Train a `JanusVQVAE` without codebook, decoding unit latents with added noise."""

    def loss_of(item: WeightedImages) -> Tensor:
        latents = encode_latents(coder, item.images)
        latents = functional.normalize(latents + _DISTURBANCE * torch.randn_like(latents), dim=1)
        return _reconstruction_loss(coder, latents, item)

    parameters = [p for p in coder.parameters() if p is not coder.quantize.embedding.weight]
    fit(parameters, batches(data, run.seed), loss_of, CosineDecay(steps, 3e-3), "see", run)


def train_codebook(coder: Any, data: WeightedImages, steps: int, run: TrainingRun) -> None:
    """Initialise the codebook by k-means on unit latents, then train with quantised latents.

    Uses straight-through gradients and moving averages of codes (van den Oord et al. 2017).
    """
    book = coder.quantize.embedding.weight.requires_grad_(False)
    book.copy_(_find_centres(coder, data, run.seed))
    sums = book.clone()

    def loss_of(item: WeightedImages) -> Tensor:
        latents = encode_latents(coder, item.images)
        nearest = _nearest(book, latents.detach())
        quantised = book[nearest].permute(0, 3, 1, 2)
        commitment = (quantised - latents).square().sum(1).mean()
        straight = latents + (quantised - latents).detach()
        flat = latents.detach() * item.weights[:, None]
        flat = flat.permute(0, 2, 3, 1).flatten(0, 2)
        sums.mul_(_DECAY).index_add_(0, nearest.flatten(), flat, alpha=1 - _DECAY)
        book.copy_(functional.normalize(sums, dim=-1))
        loss: Tensor = _reconstruction_loss(coder, straight, item) + _COMMITMENT * commitment
        return loss

    parameters = [p for p in coder.parameters() if p is not book]
    fit(parameters, batches(data, run.seed + 1), loss_of, CosineDecay(steps, 2e-3), "paint", run)
    book.requires_grad_(True)


def encode_latents(coder: Any, images: Tensor) -> Tensor:  # (B, 3, P, P) -> (B, d, 9, 9)
    """Encoder latents, normalised to unit length."""
    return functional.normalize(coder.quant_conv(coder.encoder(images)), dim=1)


@torch.no_grad()
def encode_images(coder: Any, images: Tensor) -> Tensor:  # (B, 3, P, P) -> (B, 81) int64
    """The nearest code of every patch."""
    return _nearest(coder.quantize.embedding.weight, encode_latents(coder, images)).flatten(1)


def _nearest(book: Tensor, latents: Tensor) -> Tensor:  # -> (B, 9, 9) int64
    return torch.einsum("bdhw, kd -> bhwk", latents, book).argmax(-1)


def reconstruction_error(coder: Any, latents: Tensor, images: Tensor) -> Tensor:  # -> (B, h, w)
    """Reconstruction error of images decoded from latents, per code."""
    error = coder.decoder(coder.post_quant_conv(latents)) - images
    off = error.square() + 0.1 * error.abs()
    height, width = latents.shape[-2:]
    each: Tensor = functional.adaptive_avg_pool2d(off, (height, width)).mean(1)
    return each


def _reconstruction_loss(coder: Any, latents: Tensor, item: WeightedImages) -> Tensor:  # -> ()
    return (
        reconstruction_error(coder, latents, item.images) * item.weights
    ).sum() / item.weights.sum()


def render_images(scenes: Sequence[Scene]) -> Tensor:  # -> (B, 3, P, P), from -1 to 1
    """Render scenes as inputs of Janus."""
    return boards.render_images(scenes, PIXELS)


def render_tiled_scenes(count: int, run: TrainingRun) -> WeightedImages:
    """Images of tiled scenes with one to nine things."""
    generator = np.random.default_rng((run.seed, 7))
    source = sample_scenes(_NUMBERS + (run.seed << 24), generator, BOARD**2)
    scenes = [add_tiles(scene, generator) for scene in islice(source, count)]
    chunks = iterate_chunks(scenes, _AT_ONCE, "render", run.progress)
    images = torch.cat([render_images(part) for part in chunks])
    return WeightedImages(
        images, 1 + (_OBJECT_WEIGHT - 1) * occupied_codes(scenes).unflatten(1, (SIDE, SIDE))
    )


def batches(data: WeightedImages, seed: int) -> Iterator[WeightedImages]:
    """Infinite shuffled batches."""
    generator = np.random.default_rng((seed, 18))
    for picks in shuffle_batches(len(data.images), _BATCH, generator):
        yield WeightedImages(data.images[picks], data.weights[picks])


def occupied_codes(scenes: Sequence[Scene], side: int = SIDE) -> Tensor:  # -> (n, side ** 2) floats
    """One for codes of board cells with an object, zero for all others."""
    is_there = (boards.encode_boards(scenes)[..., 0] > 0).unflatten(-1, (BOARD, BOARD))
    across = side // BOARD
    codes: Tensor = repeat(is_there, "n h w -> n (h r w c)", r=across, c=across)
    return codes.float()


def sample_scenes(number: int, generator: np.random.Generator, max_things: int) -> Iterator[Scene]:
    """Scenes with one to `max_things` things in random cells, counts uniform."""
    for things in iterate_thing_groups(number):
        count = 1 + int(generator.integers(max_things))
        yield arrange_things(things, sorted(generator.permutation(BOARD**2)[:count]))


@torch.no_grad()
def _find_centres(
    coder: Any, data: WeightedImages, seed: int
) -> Tensor:  # -> (K, d), of length one
    """Spherical k-means of the latents of some images.

    A centre without members moves to the latent farthest from its centre.
    """
    images, weights = data.images[:_KMEANS_IMAGES], data.weights[:_KMEANS_IMAGES].flatten()
    latents = [encode_latents(coder, part).permute(0, 2, 3, 1) for part in images.split(_AT_ONCE)]
    points = torch.cat(latents).flatten(0, 2)
    generator = torch.Generator().manual_seed(seed)
    centres = points[torch.multinomial(weights, CODES, generator=generator)]
    for _ in range(_ROUNDS):
        likeness, nearest = (points @ centres.T).max(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points * weights[:, None])
        is_idle = torch.bincount(nearest, minlength=len(centres)) == 0
        sums[is_idle] = points[likeness.argsort()[: int(is_idle.sum())]]
        centres = functional.normalize(sums, dim=-1)
    return centres
