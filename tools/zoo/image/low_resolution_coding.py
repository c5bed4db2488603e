"""Train the autoencoder of a small Janus, in which one code is a whole thing.

Codes represent kinds of things: name, colour and size. The position of a thing within its cell is
omitted, so there is one code per kind, and one for blank cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mmspec.training.fitting import CosineDecay, TrainingRun, fit
from mmspec.zoo.scene import BOARD, Scene
from mmspec.zoo.scene_tensors import BOARD_CLASSES, encode_boards, render_images
from tools.zoo.image.coding import encode_latents, reconstruction_error, sample_scenes
from tools.zoo.image.models import PictureFormat

_NAMES, _COLOURS, _SIZES = (count - 1 for count in BOARD_CLASSES)
KINDS = _NAMES * _COLOURS * _SIZES
SMALL = PictureFormat(pixels=24, side=BOARD, codes=1 + KINDS, width=24)
_NUMBERS = 1 << 48  # first scene seed, different for every stage
_SHARPNESS = 20.0  # logits per unit of cosine similarity
_PIXEL_NOISE = 0.04  # std; images to be encoded may be generated ones


def encode_kinds(scenes: Sequence[Scene]) -> Tensor:  # -> (B, 9) int64, 0 = blank
    """The code of the thing in each cell."""
    name, colour, size = encode_boards(scenes).unbind(-1)
    kind = 1 + ((name - 1) * _COLOURS + colour - 1) * _SIZES + size - 1
    return kind.masked_fill(name == 0, 0)


def kind_attributes(
    codes: Tensor,
) -> Tensor:  # (...) -> (..., 3): name, colour, size; 0 where blank
    """What codes stand for, in the numbers of `mmspec.zoo.scene_tensors.board`."""
    kind = codes - 1
    name, colour, size = kind // (_COLOURS * _SIZES), kind // _SIZES % _COLOURS, kind % _SIZES
    parts = torch.stack([name, colour, size], -1) + 1
    return parts.masked_fill((codes == 0)[..., None], 0)


def train_kind_codebook(coder: Any, steps: int, run: TrainingRun) -> None:
    """Train a `JanusVQVAE` to encode cells to the codes of their kinds, and to decode them."""
    book = coder.quantize.embedding.weight

    def loss_of(item: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = item
        latents = encode_latents(coder, images + _PIXEL_NOISE * torch.randn_like(images))
        unit = functional.normalize(book, dim=-1)
        similarity = torch.einsum("bdhw, kd -> bkhw", latents, unit).flatten(2)
        quantised = unit[labels].permute(0, 2, 1).unflatten(2, (BOARD, BOARD))
        error = functional.cross_entropy(_SHARPNESS * similarity, labels)
        return error + reconstruction_error(coder, quantised, images).mean()

    parameters, batches = list(coder.parameters()), _image_batches(16, run.seed)
    fit(parameters, batches, loss_of, CosineDecay(steps, 2e-3), "see", run)
    with torch.no_grad():
        book.copy_(functional.normalize(book, dim=-1))


def _image_batches(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = np.random.default_rng((seed, 14))
    source = sample_scenes(_NUMBERS + (seed << 24), generator, BOARD**2)
    while True:
        scenes = list(islice(source, batch))
        yield render_images(scenes, SMALL.pixels), encode_kinds(scenes)
