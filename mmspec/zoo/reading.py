"""Read a picture of the Scene world back into a scene, and count how many facts are right.

Every cell is held against drawings of every name, size and displacement, in every colour, both
seen slightly out of focus; the nearest wins if it is near enough. There is nothing to learn, so
the reading of a picture is a judge that no model can flatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from mmspec.training.fitting import chunks
from mmspec.zoo.drawing import PAPER, RGB
from mmspec.zoo.facts import Mention, score_mentions
from mmspec.zoo.prompts import Prompt
from mmspec.zoo.scene import BOARD, COLOURS, DIGITS, SHAPES, SIZES, Scene, Thing

_CELL = 16  # pixels a side of a cell, after resizing
_SHIFTS = tuple(np.linspace(-0.0625, 0.0625, 5))  # cells; the scenes go to 0.06 on either side
_BLUR = 0.6  # standard deviation, in pixels after resizing
_FARTHEST = 0.20  # root mean square distance over a cell beyond which nothing is recognised
_LEAST = 0.5  # share of the ink of a cell that must be explained


@dataclass(frozen=True)
class _Drawings:
    """What cells can hold: `cover` (T, P) is the share of ink in each pixel of drawing t."""

    things: tuple[Thing, ...]  # black, in the first cell
    cover: Tensor


def read(image: Image.Image | np.ndarray) -> Scene:
    """What a picture shows. `image`: a PIL image, or (H, W, 3) bytes or floats in [0, 1]."""
    return read_all([image])[0]


def read_all(images: Sequence[Image.Image | np.ndarray]) -> list[Scene]:
    """What each picture shows, all read at once. Square pictures of any size."""
    if not len(images):
        return []
    drawings = _drawings()
    inks = torch.tensor([RGB[c] for c in COLOURS]) / 255 - _paper()  # (C, 3)
    cells = torch.stack([_cells(_canvas(image)) for image in images])  # (B, 9, P, 3)
    found = torch.einsum("tp, bnpk, ck -> bntc", drawings.cover, cells, inks)
    size = drawings.cover.square().sum(-1)[:, None] * inks.square().sum(-1)  # (T, C)
    blank = cells.square().sum((-2, -1))  # (B, 9), distance from an empty cell
    distance, best = (size - 2 * found).flatten(2).min(-1)
    distance = (blank + distance).clamp(min=0)
    near = distance < _FARTHEST**2 * 3 * cells.shape[2]
    is_thing = near & (distance < (1 - _LEAST) * blank)
    return [
        Scene(
            tuple(
                _placed(drawings.things[pick // len(COLOURS)], pick % len(COLOURS), cell)
                for cell, pick in enumerate(picks)
                if shown[cell]
            )
        )
        for picks, shown in zip(best.tolist(), is_thing.tolist(), strict=True)
    ]


def score_picture(scene: Scene, image: Image.Image | np.ndarray | Scene) -> tuple[int, int]:
    """Facts of `scene` that a picture (or what was read of one) gets right, and facts asked.

    Counted as in captions: four for every thing, one more (wrong) for each thing made up.
    """
    shown = image if isinstance(image, Scene) else read(image)
    return score_mentions(scene, [Mention(t.name, t.size, t.colour, t.place) for t in shown.things])


def score_pictures(
    scenes: Sequence[Scene], images: Sequence[Image.Image | np.ndarray]
) -> tuple[int, int]:
    """Facts right and facts asked over pictures of some scenes."""
    scored = [score_picture(s, shown) for s, shown in zip(scenes, read_all(images), strict=True)]
    return sum(right for right, _ in scored), sum(asked for _, asked in scored)


def facts_drawn(
    asked: Sequence[Prompt], draw: Callable[[list[str], int], np.ndarray], batch: int = 32
) -> tuple[int, int]:
    """Facts right and facts asked over prompts; `draw` makes pictures of texts, by a seed."""
    drawn: list[np.ndarray] = []
    for part in chunks(asked, batch):
        drawn += list(draw([prompt.text for prompt in part], len(drawn)))
    return score_pictures([prompt.scene for prompt in asked], drawn)


def _placed(drawn: Thing, colour: int, cell: int) -> Thing:
    row, column = divmod(cell, BOARD)
    return Thing(drawn.shape, COLOURS[colour], drawn.size, row, column, drawn.digit, drawn.shift)


@cache
def _drawings() -> _Drawings:
    names = [(s, None) for s in SHAPES] + [("digit", d) for d in range(len(DIGITS))]
    things = tuple(
        Thing(shape, "black", size, 0, 0, digit, (float(x), float(y)))
        for (shape, digit), size, x, y in product(names, SIZES, _SHIFTS, _SHIFTS)
    )
    black = torch.tensor(RGB["black"]) / 255 - _paper()
    pictures = torch.stack([_canvas(Scene((t,)).render(BOARD * _CELL)) for t in things])
    first = torch.stack([_cells(picture)[0] for picture in pictures])  # (T, P, 3)
    return _Drawings(things, first @ black / black.square().sum())


def _paper() -> Tensor:  # -> (3,)
    return torch.tensor(PAPER) / 255


def _canvas(image: Image.Image | np.ndarray) -> Tensor:  # -> (3, S, S), zero where there is paper
    array = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    if array.ndim != 3 or array.shape[0] != array.shape[1] or array.shape[2] != 3:
        raise ValueError(f"a picture of shape {array.shape} was given; it must be (S, S, 3)")
    scale = 255 if array.dtype == np.uint8 else 1
    pixels = torch.from_numpy(array / np.float32(scale)).float() - _paper()
    side = (BOARD * _CELL, BOARD * _CELL)
    planes = functional.interpolate(
        pixels.permute(2, 0, 1)[None], side, mode="bicubic", antialias=True
    )
    reach = torch.arange(-2, 3)
    weights = torch.softmax(-(reach**2) / (2 * _BLUR**2), 0)
    kernel = (weights[:, None] * weights).expand(3, 1, 5, 5)
    blurred: Tensor = functional.conv2d(functional.pad(planes, (2, 2, 2, 2)), kernel, groups=3)
    return blurred[0]


def _cells(canvas: Tensor) -> Tensor:  # (3, S, S) -> (9, P, 3), in reading order
    cut = canvas.unflatten(1, (BOARD, _CELL)).unflatten(3, (BOARD, _CELL))  # (3, r, y, c, x)
    cells: Tensor = cut.permute(1, 3, 2, 4, 0).flatten(2, 3).flatten(0, 1)
    return cells
