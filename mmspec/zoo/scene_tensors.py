"""Scenes as training tensors: images, and class labels of each cell of the board."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.zoo.scene import BOARD, COLOURS, DIGITS, SHAPES, Scene, Thing, sample

PIXELS = 48  # default side of an image
LATENT_SIDE, LATENT_CHANNELS = 12, 4  # of an autoencoder for such images
BOARD_CLASSES = (1 + len(SHAPES) + len(DIGITS), 1 + len(COLOURS), 3)


def render_pixels(scene: Scene, side: int = PIXELS) -> np.ndarray:  # -> (P, P, 3) bytes
    """Render a scene at the input size of the bundled models."""
    return np.array(scene.render(side))


def render_images(
    scenes: Sequence[Scene], side: int = PIXELS
) -> Tensor:  # -> (B, 3, P, P), -1 to 1
    """Render scenes as inputs of an autoencoder."""
    return images_to_tensor(np.stack([render_pixels(scene, side) for scene in scenes]))


def images_to_tensor(images: np.ndarray) -> Tensor:  # (B, P, P, 3) bytes -> (B, 3, P, P), -1 to 1
    """Scale bytes to [-1, 1], channels first."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


def encode_boards(scenes: Sequence[Scene]) -> Tensor:  # -> (B, 9, 3)
    """Return labels of each cell (name, colour, size); 0 is an empty cell."""
    return torch.stack([encode_board(scene) for scene in scenes])


def encode_board(scene: Scene) -> Tensor:  # -> (9, 3)
    """Return labels of each cell of one scene."""
    found = torch.zeros(BOARD**2, 3, dtype=torch.long)
    for t in scene.things:
        name = SHAPES.index(t.shape) if t.digit is None else len(SHAPES) + t.digit
        row = (name, COLOURS.index(t.colour), t.size == "large")
        found[BOARD * t.row + t.column] = 1 + torch.tensor(row, dtype=torch.long)
    return found


def board_loss(logits: Tensor, labels: Tensor) -> Tensor:  # (B, 9, classes), (B, 9, 3) -> ()
    """Return the sum of the cross entropies of name, colour and size."""
    losses = [
        functional.cross_entropy(part.flatten(0, 1), true.flatten())
        for part, true in zip(logits.split(BOARD_CLASSES, -1), labels.unbind(-1), strict=True)
    ]
    return torch.stack(losses).sum()


def init_autoencoder(coder: nn.Module, last: nn.Module) -> None:
    """Initialize an autoencoder so that all layers have the same variance (He et al. 2015).

    `last` is the output layer; its bias is set to the colour of the background. Without
    normalisation layers, the default initialization trains several times slower.
    """
    with torch.no_grad():
        for convolution in [m for m in coder.modules() if isinstance(m, nn.Conv2d)]:
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            if convolution.bias is not None:
                nn.init.zeros_(convolution.bias)
        last.get_parameter("weight").mul_(0.1)
        last.get_parameter("bias").fill_(0.95)


def iterate_thing_groups(number: int) -> Iterator[list[Thing]]:
    """Iterate over lists of nine or more things, from scenes with seeds from `number` on."""
    while True:
        things: list[Thing] = []
        while len(things) < BOARD**2:
            things += sample(number).things
            number += 1
        yield things


def arrange_things(things: Sequence[Thing], cells: Iterable[int]) -> Scene:
    """Return a scene with `things[c]` moved to cell c, for each of the given cells."""
    return Scene(
        tuple(replace(things[c], row=int(c) // BOARD, column=int(c) % BOARD) for c in cells)
    )
