"""Scenes as models learn them: pixels, and what is in each place of the board."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.zoo.scene import BOARD, COLOURS, DIGITS, SHAPES, Scene, Thing, sample

PIXELS = 48  # a side of most pictures
LATENT_SIDE, LATENT_CHANNELS = 12, 4  # what an autoencoder makes of such a picture
BOARD_CLASSES = (1 + len(SHAPES) + len(DIGITS), 1 + len(COLOURS), 3)


def pixels(scene: Scene, side: int = PIXELS) -> np.ndarray:  # -> (P, P, 3) bytes
    """Render a scene at the size that models read."""
    return np.array(scene.render(side))


def pictures(scenes: Sequence[Scene], side: int = PIXELS) -> Tensor:  # -> (B, 3, P, P), -1 to 1
    """Render scenes as autoencoders see them."""
    return as_pictures(np.stack([pixels(scene, side) for scene in scenes]))


def as_pictures(images: np.ndarray) -> Tensor:  # (B, P, P, 3) bytes -> (B, 3, P, P), -1 to 1
    """Bytes as models see them."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


def boards(scenes: Sequence[Scene]) -> Tensor:  # -> (B, 9, 3)
    """What is in each place: name, colour, size; 0 is nothing."""
    return torch.stack([board(scene) for scene in scenes])


def board(scene: Scene) -> Tensor:  # -> (9, 3)
    """What is in each place of one scene."""
    found = torch.zeros(BOARD**2, 3, dtype=torch.long)
    for t in scene.things:
        name = SHAPES.index(t.shape) if t.digit is None else len(SHAPES) + t.digit
        row = (name, COLOURS.index(t.colour), t.size == "large")
        found[BOARD * t.row + t.column] = 1 + torch.tensor(row, dtype=torch.long)
    return found


def board_loss(said: Tensor, wanted: Tensor) -> Tensor:  # (B, 9, sum of classes), (B, 9, 3) -> ()
    """Cross entropy of name, colour and size in every place, added up."""
    losses = [
        functional.cross_entropy(part.flatten(0, 1), true.flatten())
        for part, true in zip(said.split(BOARD_CLASSES, -1), wanted.unbind(-1), strict=True)
    ]
    return torch.stack(losses).sum()


def begin_near_paper(coder: nn.Module, last: nn.Module) -> None:
    """Begin an autoencoder with signals of even size in every layer (He et al. 2015).

    `last` is what paints. Without normalisation, training from the usual start takes several times
    as long.
    """
    with torch.no_grad():
        for convolution in [m for m in coder.modules() if isinstance(m, nn.Conv2d)]:
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            if convolution.bias is not None:
                nn.init.zeros_(convolution.bias)
        last.get_parameter("weight").mul_(0.1)
        last.get_parameter("bias").fill_(0.95)


def crowds(number: int) -> Iterator[list[Thing]]:
    """Nine things or more, without end, taken from scenes beginning with `number`."""
    while True:
        things: list[Thing] = []
        while len(things) < BOARD**2:
            things += sample(number).things
            number += 1
        yield things


def arranged(things: Sequence[Thing], cells: Iterable[int]) -> Scene:
    """The thing of each of some cells, moved there."""
    return Scene(
        tuple(replace(things[c], row=int(c) // BOARD, column=int(c) % BOARD) for c in cells)
    )
