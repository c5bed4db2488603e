"""Teach the picture part of a small Janus, in which one code is a whole thing.

Codes are for kinds of things: name, colour and size. Where a thing stands within its place is left
out, so that there are as many codes as kinds, and one for blank places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mmspec.training.fitting import Course, Fall, fit
from mmspec.zoo.boards import BOARD_CLASSES, boards, pictures
from mmspec.zoo.scene import BOARD, Scene
from tools.zoo.image.coding import latents, painted, scattered
from tools.zoo.image.models import PictureFormat

_NAMES, _COLOURS, _SIZES = (count - 1 for count in BOARD_CLASSES)
KINDS = _NAMES * _COLOURS * _SIZES
SMALL = PictureFormat(pixels=24, side=BOARD, codes=1 + KINDS, width=24)
_NUMBERS = 1 << 48  # scenes come from seeds of their own
_SHARPNESS = 20.0  # logits per unit of likeness
_GRAIN = 0.04  # noise on pixels: pictures to be coded are painted ones


def kinds(scenes: Sequence[Scene]) -> Tensor:  # -> (B, 9) int64, 0 = blank
    """The code of what is in each place."""
    name, colour, size = boards(scenes).unbind(-1)
    kind = 1 + ((name - 1) * _COLOURS + colour - 1) * _SIZES + size - 1
    return kind.masked_fill(name == 0, 0)


def parts_of(codes: Tensor) -> Tensor:  # (...) -> (..., 3): name, colour, size; 0 where blank
    """What codes stand for, in the numbers of `mmspec.zoo.boards.board`."""
    kind = codes - 1
    name, colour, size = kind // (_COLOURS * _SIZES), kind // _SIZES % _COLOURS, kind % _SIZES
    parts = torch.stack([name, colour, size], -1) + 1
    return parts.masked_fill((codes == 0)[..., None], 0)


def learn_kinds(coder: Any, steps: int, course: Course) -> None:
    """Train a `JanusVQVAE` to see the code of each place, and to paint codes."""
    book = coder.quantize.embedding.weight

    def loss_of(item: tuple[Tensor, Tensor]) -> Tensor:
        images, wanted = item
        seen = latents(coder, images + _GRAIN * torch.randn_like(images))
        unit = functional.normalize(book, dim=-1)
        likeness = torch.einsum("bdhw, kd -> bkhw", seen, unit).flatten(2)
        said = unit[wanted].permute(0, 2, 1).unflatten(2, (BOARD, BOARD))
        missed = functional.cross_entropy(_SHARPNESS * likeness, wanted)
        return missed + painted(coder, said, images).mean()

    learnt, shown = list(coder.parameters()), _shown(16, course.seed)
    fit(learnt, shown, loss_of, Fall(steps, 2e-3), "see", course)
    with torch.no_grad():
        book.copy_(functional.normalize(book, dim=-1))


def _shown(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = np.random.default_rng((seed, 14))
    source = scattered(_NUMBERS + (seed << 24), generator, BOARD**2)
    while True:
        scenes = list(islice(source, batch))
        yield pictures(scenes, SMALL.pixels), kinds(scenes)
