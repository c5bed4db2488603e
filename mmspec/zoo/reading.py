"""Read a picture of the Scene world back into a scene, and count how many facts are right.

Every place is held against drawings of every name, size, turn and displacement, in every colour,
on a ground that is seen around them; both are seen slightly out of focus. What explains a place
best wins if it explains enough. There is nothing to learn, so the reading of a picture is a judge
that no model can flatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional

from mmspec.training.fitting import chunks
from mmspec.zoo.drawing import RADIUS, RGB, cover
from mmspec.zoo.facts import Mention, score_mentions
from mmspec.zoo.prompts import Prompt
from mmspec.zoo.scene import BOARD, COLOURS, DIGITS, SHAPES, SIZES, Scene, Thing

_CELL = 16  # pixels a side of a cell, after resizing
_SIDE = BOARD * _CELL
_WINDOW, _MIDDLE = 19, 9  # pixels a side of what is looked at around a place
_BLUR = 0.6  # standard deviation, in pixels after resizing
_MASTER, _MARGIN = 320, 1.25  # of a drawing before it is put in its pose: pixels, room around it
_FINENESS = 6  # points across a pixel of a drawing
_LEAST = 0.5  # share of what differs from the ground that must be explained
_FARTHEST = 0.28  # root mean square of what is not, over the contrast, at most
_SLACK = 1.5  # of a first look, whose drawings are few
_PALEST = 0.25  # distance of ink and ground, in the unit cube of RGB, below which nothing is seen
_FAINTEST = 0.5  # sum of squares that something must explain to be looked at
_MOST, _STEP = 16, 2.5  # places that are looked at closely, and how far from one of nothing
_NAMES = (*((shape, None) for shape in SHAPES), *(("digit", digit) for digit in range(len(DIGITS))))
_INKS = torch.tensor([RGB[colour] for colour in COLOURS]) / 255  # (C, 3)


@dataclass(frozen=True)
class _Pose:
    """How a drawing lies around the middle of a window."""

    size: str
    scale: float
    turn: float
    x: float  # pixels
    y: float


class _Drawings:
    """What may be at a place: T drawings, and how well each in each of C colours explains it.

    Near a drawing a picture is `c * ink + (1 - c) * ground`: `cover` (T, P) is c, and the ground is
    whatever fits best there. Other inks or textures farther away are not explained by anything.
    """

    def __init__(self, poses: Sequence[_Pose]) -> None:
        self.drawn = [(name, pose) for pose in poses for name in _NAMES]
        self.near = torch.stack([_near(RADIUS[size]) for size in SIZES]).flatten(1)  # (2, P)
        self.size = torch.tensor([SIZES.index(pose.size) for _, pose in self.drawn])
        cover = torch.cat([_covers(pose) for pose in poses]).flatten(1)
        self.cover = cover * self.near[self.size]
        self.ink, self.square = self.cover.sum(1), (self.cover * cover).sum(1)  # sums of c, of c^2
        self.mixed = self.ink - self.square  # of c (1 - c)
        self.plain = self.near.sum(1)[self.size] - self.ink - self.mixed  # of (1 - c)^2

    def explained(self, places: Tensor) -> Tensor:  # (P, N, 3) -> (T, C, N)
        """How much nearer a drawing is to a window than a bare ground is: squares, summed."""
        columns = places.transpose(1, 2).flatten(1)  # (P, 3 * N)
        seen = (self.cover @ columns).unflatten(1, (3, -1))  # (T, 3, N)
        near = (self.near @ columns).unflatten(1, (3, -1))
        far, whole, room = near[self.size] - seen, near[-1], self.near[-1].sum()
        per = (slice(None), None, None)
        plain, mixed, ink, square = (
            one[per] for one in (self.plain, self.mixed, self.ink, self.square)
        )
        by_ink, inks = _INKS @ far, _INKS.square().sum(1)[:, None]
        there = (by_ink - mixed * inks) / plain  # ground . ink, and so on
        ground = (_dot(far, far) - mixed * (2 * by_ink - mixed * inks)) / plain**2
        behind = (_dot(seen, far) - mixed * (_INKS @ seen)) / plain
        around = (_dot(far, whole) - mixed * (_INKS @ whole)) / plain
        fitted = 2 * (_INKS @ seen - behind - ink * (there - ground))
        drawn = fitted - square * (inks - 2 * there + ground)
        gain: Tensor = 2 * around - room * ground - whole.square().sum(0) / room + drawn
        return gain

    def seen(self, place: Tensor, drawing: int, colour: int, slack: float = 1) -> Tensor | None:
        """What a place is without that drawing, (P, 3); None where it is not to be seen there.

        It must stand out from its ground, explain most of what does, and leave little else; `slack`
        forgives so many times as much.
        """
        near, cover = self.near[self.size[drawing]][:, None], self.cover[drawing][:, None]
        ink, bare = _INKS[colour], near - cover
        ground = (bare * (place - cover * ink)).sum(0) / self.plain[drawing]
        without = place - cover * (ink - ground)
        left, blank = ((near * (one - ground).square()).sum() for one in (without, place))
        contrast = (ink - ground).square().sum()
        is_clear = left < slack * (1 - _LEAST) * blank
        is_near = left < (slack * _FARTHEST) ** 2 * contrast * near.sum()
        return without if (contrast > _PALEST**2) & is_clear & is_near else None


def read(image: Image.Image | np.ndarray) -> Scene:
    """What a picture shows. `image`: a PIL image, or (H, W, 3) bytes or floats in [0, 1]."""
    return read_all([image])[0]


def read_all(images: Sequence[Image.Image | np.ndarray]) -> list[Scene]:
    """What each picture shows. Square pictures of any size; things where they are, grounds not."""
    return [_read(_canvas(image)) for image in images]


def _read(canvas: Tensor) -> Scene:  # (3, S, S)
    """Look closely at one place after the other, the likeliest first, and wipe out what is seen."""
    room = functional.pad(canvas[None], (_MIDDLE,) * 4, mode="replicate")[0]
    coarse, fine = _coarse(), _fine()
    spots = _varied(room).nonzero()  # (y, x) of what may be the middle of something
    if not len(spots):
        return Scene(())
    clear, best = coarse.explained(_places(room, spots)).flatten(0, 1).max(0)
    things: list[Thing] = []
    for _ in range(_MOST):
        spot = int(clear.argmax())
        if clear[spot] < _FAINTEST:
            break
        apart = (spots - spots[spot]).float().norm(dim=1)
        clear[apart < _STEP] = 0
        place = _places(room, spots[spot, None])
        guess = divmod(int(best[spot]), len(COLOURS))
        if coarse.seen(place[:, 0], *guess, _SLACK) is None:
            continue
        drawing, colour = divmod(int(fine.explained(place).argmax()), len(COLOURS))
        without = fine.seen(place[:, 0], drawing, colour)
        if without is None:
            continue
        y, x = spots[spot].tolist()
        things.append(_thing(fine.drawn[drawing], colour, x, y))
        room[:, y : y + _WINDOW, x : x + _WINDOW] = without.T.unflatten(1, (_WINDOW, _WINDOW))
        around = (apart < _WINDOW) & (clear > 0)
        found = coarse.explained(_places(room, spots[around]))
        clear[around], best[around] = found.flatten(0, 1).max(0)
    return Scene(tuple(sorted(things, key=lambda thing: (thing.row, thing.column))))


def _varied(room: Tensor) -> Tensor:  # -> (S, S) bool
    """Where a window is no single tone: what does not differ from a ground needs no explanation."""
    near = _near(RADIUS["large"])
    sums = functional.conv2d(
        torch.stack([room, room.square()]).flatten(0, 1)[:, None], near[None, None]
    )
    whole, squares = sums[:, 0].unflatten(0, (2, 3))
    off: Tensor = squares - whole.square() / near.sum()
    return off.sum(0) >= _FAINTEST


def _places(room: Tensor, spots: Tensor) -> Tensor:  # (N, 2) -> (P, N, 3)
    """The windows around some pixels."""
    windows = room.unfold(1, _WINDOW, 1).unfold(2, _WINDOW, 1)
    return windows[:, spots[:, 0], spots[:, 1]].flatten(2).permute(2, 1, 0)


def _thing(drawn: tuple[tuple[str, int | None], _Pose], colour: int, x: int, y: int) -> Thing:
    """A drawing in the middle of a pixel of the canvas."""
    (shape, digit), pose = drawn
    across, down = (x + 0.5 + pose.x) / _CELL, (y + 0.5 + pose.y) / _CELL
    column, row = (min(max(int(at), 0), BOARD - 1) for at in (across, down))
    shift = (across - column - 0.5, down - row - 0.5)
    size, ink = pose.size, COLOURS[colour]
    return Thing(shape, ink, size, row, column, digit, shift, pose.scale, pose.turn)


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


@cache
def _coarse() -> _Drawings:
    """Enough to find places: whatever is there, some drawing is near it."""
    return _Drawings([_Pose(size, 1.0, 0.0, 0.0, 0.0) for size in SIZES])


@cache
def _fine() -> _Drawings:
    scales, turns, steps = (0.94, 1.0, 1.06), (-10, -5, 0, 5, 10), (-0.5, 0, 0.5)
    poses = product(SIZES, scales, turns, steps, steps)
    return _Drawings([_Pose(*pose) for pose in poses])


def _near(radius: float) -> Tensor:  # -> (W, W)
    """Where a ground is seen around a thing: a little farther than the thing reaches."""
    away = torch.arange(_WINDOW) - _MIDDLE
    return (away[:, None] ** 2 + away**2 <= (1.15 * _CELL * radius + 1.2) ** 2).float()


def _covers(pose: _Pose) -> Tensor:  # -> (names, W, W)
    """The share of ink in each pixel of every name, around the middle of a window."""
    points = (torch.arange(_WINDOW * _FINENESS) + 0.5) / _FINENESS - _WINDOW / 2
    y, x = torch.meshgrid(points - pose.y, points - pose.x, indexing="ij")
    turn, unit = math.radians(pose.turn), _MARGIN * _CELL * RADIUS[pose.size] * pose.scale
    across = (math.cos(turn) * x + math.sin(turn) * y) / unit
    down = (math.cos(turn) * y - math.sin(turn) * x) / unit
    grid = torch.stack([across, down], -1)[None]
    drawn = functional.grid_sample(_masters()[None], grid, align_corners=False)
    return _blurred(functional.avg_pool2d(drawn, _FINENESS), "constant")[0]


@cache
def _masters() -> Tensor:  # -> (names, M, M)
    """Every name, large and upright."""
    found = []
    for shape, digit in _NAMES:
        mask = Image.new("L", (_MASTER, _MASTER))
        thing, middle = Thing(shape, "black", "large", 0, 0, digit), _MASTER / 2
        cover(ImageDraw.Draw(mask), thing, middle, middle, middle / _MARGIN)
        found.append(torch.from_numpy(np.array(mask)).float())
    return torch.stack(found)


def _canvas(image: Image.Image | np.ndarray) -> Tensor:  # -> (3, S, S)
    array = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    if array.ndim != 3 or array.shape[0] != array.shape[1] or array.shape[2] != 3:
        raise ValueError(f"a picture of shape {array.shape} was given; it must be (S, S, 3)")
    scale = 255 if array.dtype == np.uint8 else 1
    pixels = torch.from_numpy(array / np.float32(scale)).float().permute(2, 0, 1)[None]
    side = (_SIDE, _SIDE)
    planes = functional.interpolate(pixels, side, mode="bicubic", antialias=True)
    return _blurred(planes, "replicate")[0]


def _blurred(planes: Tensor, mode: str) -> Tensor:  # (B, C, H, W)
    """Slightly out of focus; `mode` says what lies beyond the edge."""
    reach = torch.arange(-2, 3)
    weights = torch.softmax(-(reach**2) / (2 * _BLUR**2), 0)
    kernel = (weights[:, None] * weights).expand(planes.shape[1], 1, 5, 5)
    return functional.conv2d(
        functional.pad(planes, (2, 2, 2, 2), mode=mode), kernel, groups=planes.shape[1]
    )


def _dot(one: Tensor, other: Tensor) -> Tensor:  # (..., 3, N) -> (..., 1, N)
    return (one * other).sum(-2, keepdim=True)
