"""Parse an image of the Scene world into a scene, and count how many facts are right.

Template matching: every window is compared with blurred templates of every name, size, rotation and
displacement, in every colour, on a background estimated from the pixels around. The best template
is accepted if it explains enough of the window. No part of the parser is trained.
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

from mmspec.training.fitting import iterate_chunks
from mmspec.zoo.drawing import RADIUS, RGB, cover
from mmspec.zoo.facts import Mention, score_mentions
from mmspec.zoo.prompts import Prompt
from mmspec.zoo.scene import BOARD, COLOURS, DIGITS, SHAPES, SIZES, Scene, Thing

_CELL = 16  # side of a cell in pixels, after resizing
_SIDE = BOARD * _CELL
_WINDOW, _MIDDLE = 19, 9  # side of a window in pixels, and its middle
_BLUR = 0.6  # standard deviation, in pixels after resizing
_MASTER, _MARGIN = 320, 1.25  # of a template before its pose: side in pixels, relative margin
_FINENESS = 6  # sampling points across a pixel of a template
_MIN_EXPLAINED = 0.5  # minimum share of the difference to the background that must be explained
_MAX_RESIDUAL = 0.28  # maximum root mean square of the rest, relative to the contrast
_SLACK = 1.5  # of the coarse search, which has few templates
_MIN_CONTRAST = 0.25  # distance of ink and background, in the unit cube of RGB
_MIN_GAIN = 0.5  # sum of squares that a template must explain
_MAX_CANDIDATES, _STEP = 16, 2.5  # of the fine search, and pixels between two candidates
_NAMES = (*((shape, None) for shape in SHAPES), *(("digit", digit) for digit in range(len(DIGITS))))
_INKS = torch.tensor([RGB[colour] for colour in COLOURS]) / 255  # (C, 3)


@dataclass(frozen=True)
class _Pose:
    """Pose of a template relative to the middle of a window."""

    size: str
    scale: float
    turn: float
    x: float  # pixels
    y: float


class _Templates:
    """T templates in C colours, and the fit of each to a window.

    Near a thing an image is `c * ink + (1 - c) * ground`: `cover` (T, P) is c, and the ground is
    the colour with the best fit. Pixels farther away are ignored.
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

    def score_windows(self, places: Tensor) -> Tensor:  # (P, N, 3) -> (T, C, N)
        """Return the decrease of the squared error by a template, relative to a plain ground."""
        columns = places.transpose(1, 2).flatten(1)  # (P, 3 * N)
        seen = (self.cover @ columns).unflatten(1, (3, -1))  # (T, 3, N)
        near = (self.near @ columns).unflatten(1, (3, -1))
        far, whole, area = near[self.size] - seen, near[-1], self.near[-1].sum()
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
        gain: Tensor = 2 * around - area * ground - whole.square().sum(0) / area + drawn
        return gain

    def remove_drawing(
        self, place: Tensor, drawing: int, colour: int, slack: float = 1
    ) -> Tensor | None:
        """Return a window without a template, (P, 3); None if the template does not match.

        A match has enough contrast, explains most of the window and leaves a small residual;
        `slack` multiplies these limits.
        """
        near, cover = self.near[self.size[drawing]][:, None], self.cover[drawing][:, None]
        ink, bare = _INKS[colour], near - cover
        ground = (bare * (place - cover * ink)).sum(0) / self.plain[drawing]
        without = place - cover * (ink - ground)
        left, blank = ((near * (one - ground).square()).sum() for one in (without, place))
        contrast = (ink - ground).square().sum()
        is_clear = left < slack * (1 - _MIN_EXPLAINED) * blank
        is_near = left < (slack * _MAX_RESIDUAL) ** 2 * contrast * near.sum()
        return without if (contrast > _MIN_CONTRAST**2) & is_clear & is_near else None


def parse_image(image: Image.Image | np.ndarray) -> Scene:
    """Parse an image: a PIL image, or (S, S, 3) bytes or floats in [0, 1]."""
    return parse_images([image])[0]


def parse_images(images: Sequence[Image.Image | np.ndarray]) -> list[Scene]:
    """Parse square images of any size into things with their poses; backgrounds are ignored."""
    return [_parse(_canvas(image)) for image in images]


def _parse(canvas: Tensor) -> Scene:  # (3, S, S)
    """Match windows in order of their coarse gain, and remove each thing that was found."""
    image = functional.pad(canvas[None], (_MIDDLE,) * 4, mode="replicate")[0]
    coarse, fine = _coarse(), _fine()
    spots = _find_candidates(image).nonzero()  # (y, x) of windows that may hold a thing
    if not len(spots):
        return Scene(())
    clear, best = coarse.score_windows(_places(image, spots)).flatten(0, 1).max(0)
    things: list[Thing] = []
    for _ in range(_MAX_CANDIDATES):
        spot = int(clear.argmax())
        if clear[spot] < _MIN_GAIN:
            break
        distance = (spots - spots[spot]).float().norm(dim=1)
        clear[distance < _STEP] = 0
        place = _places(image, spots[spot, None])
        guess = divmod(int(best[spot]), len(COLOURS))
        if coarse.remove_drawing(place[:, 0], *guess, _SLACK) is None:
            continue
        drawing, colour = divmod(int(fine.score_windows(place).argmax()), len(COLOURS))
        without = fine.remove_drawing(place[:, 0], drawing, colour)
        if without is None:
            continue
        y, x = spots[spot].tolist()
        things.append(_thing(fine.drawn[drawing], colour, x, y))
        image[:, y : y + _WINDOW, x : x + _WINDOW] = without.T.unflatten(1, (_WINDOW, _WINDOW))
        around = (distance < _WINDOW) & (clear > 0)
        found = coarse.score_windows(_places(image, spots[around]))
        clear[around], best[around] = found.flatten(0, 1).max(0)
    return Scene(tuple(sorted(things, key=lambda thing: (thing.row, thing.column))))


def _find_candidates(image: Tensor) -> Tensor:  # -> (S, S) bool
    """Mark windows whose variance exceeds the minimum gain of a match."""
    near = _near(RADIUS["large"])
    sums = functional.conv2d(
        torch.stack([image, image.square()]).flatten(0, 1)[:, None], near[None, None]
    )
    whole, squares = sums[:, 0].unflatten(0, (2, 3))
    off: Tensor = squares - whole.square() / near.sum()
    return off.sum(0) >= _MIN_GAIN


def _places(image: Tensor, spots: Tensor) -> Tensor:  # (N, 2) -> (P, N, 3)
    """Return the windows around pixels."""
    windows = image.unfold(1, _WINDOW, 1).unfold(2, _WINDOW, 1)
    return windows[:, spots[:, 0], spots[:, 1]].flatten(2).permute(2, 1, 0)


def _thing(drawn: tuple[tuple[str, int | None], _Pose], colour: int, x: int, y: int) -> Thing:
    """Return the thing of a template matched at a pixel of the canvas."""
    (shape, digit), pose = drawn
    across, down = (x + 0.5 + pose.x) / _CELL, (y + 0.5 + pose.y) / _CELL
    column, row = (min(max(int(at), 0), BOARD - 1) for at in (across, down))
    shift = (across - column - 0.5, down - row - 0.5)
    size, ink = pose.size, COLOURS[colour]
    return Thing(shape, ink, size, row, column, digit, shift, pose.scale, pose.turn)


def score_picture(scene: Scene, image: Image.Image | np.ndarray | Scene) -> tuple[int, int]:
    """Return (facts right, facts required) of an image, or of a scene parsed from one.

    Counted as in captions: four per thing, one more (wrong) for each thing made up.
    """
    parsed = image if isinstance(image, Scene) else parse_image(image)
    found = [Mention(t.name, t.size, t.colour, t.place) for t in parsed.things]
    return score_mentions(scene, found)


def score_pictures(
    scenes: Sequence[Scene], images: Sequence[Image.Image | np.ndarray]
) -> tuple[int, int]:
    """Return (facts right, facts required), summed over images of scenes."""
    parsed = parse_images(images)
    scores = [score_picture(scene, one) for scene, one in zip(scenes, parsed, strict=True)]
    return sum(right for right, _ in scores), sum(total for _, total in scores)


def score_drawn_prompts(
    prompts: Sequence[Prompt], draw: Callable[[list[str], int], np.ndarray], batch: int = 32
) -> tuple[int, int]:
    """Return (facts right, facts required) over prompts; `draw` maps texts and a seed to images."""
    images: list[np.ndarray] = []
    for part in iterate_chunks(prompts, batch):
        images += list(draw([prompt.text for prompt in part], len(images)))
    return score_pictures([prompt.scene for prompt in prompts], images)


@cache
def _coarse() -> _Templates:
    """Templates of the coarse search: one pose per size."""
    return _Templates([_Pose(size, 1.0, 0.0, 0.0, 0.0) for size in SIZES])


@cache
def _fine() -> _Templates:
    scales, turns, steps = (0.94, 1.0, 1.06), (-10, -5, 0, 5, 10), (-0.5, 0, 0.5)
    poses = product(SIZES, scales, turns, steps, steps)
    return _Templates([_Pose(*pose) for pose in poses])


def _near(radius: float) -> Tensor:  # -> (W, W)
    """Mask of a thing and a margin of background around it."""
    away = torch.arange(_WINDOW) - _MIDDLE
    return (away[:, None] ** 2 + away**2 <= (1.15 * _CELL * radius + 1.2) ** 2).float()


def _covers(pose: _Pose) -> Tensor:  # -> (names, W, W)
    """Return the share of ink in each pixel of a window, for every name."""
    points = (torch.arange(_WINDOW * _FINENESS) + 0.5) / _FINENESS - _WINDOW / 2
    y, x = torch.meshgrid(points - pose.y, points - pose.x, indexing="ij")
    turn, unit = math.radians(pose.turn), _MARGIN * _CELL * RADIUS[pose.size] * pose.scale
    across = (math.cos(turn) * x + math.sin(turn) * y) / unit
    down = (math.cos(turn) * y - math.sin(turn) * x) / unit
    grid = torch.stack([across, down], -1)[None]
    drawn = functional.grid_sample(_masters()[None], grid, align_corners=False)
    return _blur(functional.avg_pool2d(drawn, _FINENESS), "constant")[0]


@cache
def _masters() -> Tensor:  # -> (names, M, M)
    """Render every name, large and without rotation."""
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
    return _blur(planes, "replicate")[0]


def _blur(planes: Tensor, mode: str) -> Tensor:  # (B, C, H, W)
    """Apply a Gaussian blur; `mode` is the padding mode."""
    reach = torch.arange(-2, 3)
    weights = torch.softmax(-(reach**2) / (2 * _BLUR**2), 0)
    kernel = (weights[:, None] * weights).expand(planes.shape[1], 1, 5, 5)
    return functional.conv2d(
        functional.pad(planes, (2, 2, 2, 2), mode=mode), kernel, groups=planes.shape[1]
    )


def _dot(one: Tensor, other: Tensor) -> Tensor:  # (..., 3, N) -> (..., 1, N)
    return (one * other).sum(-2, keepdim=True)
