"""The Scene world: coloured shapes and written digits on a 3 x 3 board, sampled from a seed.

A scene is data. Images, sentences and facts are computed from it, so that generated text and images
can be scored exactly.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image, ImageFilter

from mmspec.zoo.backgrounds import PATTERNED, Background, Tiles, sample_background, sample_tint
from mmspec.zoo.drawing import RADIUS, RGB, draw

Split = Literal["train", "held-out"]
Style = Literal["plain", "textured", "tiled"]

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond")
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "pink", "black")
SIZES = ("small", "large")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
BOARD = 3

_PLACES = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)
_COUNT_PROBABILITIES = (0.08, 0.27, 0.40, 0.25)  # of one, two, three, four things
_DIGIT_RATE = 0.35
_SHIFT = 0.06  # maximum displacement from the middle of a cell, in cells
# of textured scenes:
_TEXTURED_SHIFT = 0.36  # maximum displacement, in cells
_SCALE = 0.08  # maximum change of size, relative
_TURN = 12.0  # maximum rotation, in degrees
_EDGE, _GAP = 0.04, 0.12  # minimum distance to the edge, and between two things, in cells
_BLUR, _NOISE = 0.035, 0.03  # maximum, of the camera
_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Thing:
    """One thing on the board: a shape, or a written digit when `digit` is a number."""

    shape: str
    colour: str
    size: str
    row: int
    column: int
    digit: int | None = None
    shift: tuple[float, float] = (0.0, 0.0)  # (x, y), in cells
    scale: float = 1.0  # relative to the radius of its size
    turn: float = 0.0  # degrees, clockwise

    @property
    def radius(self) -> float:
        """Half the height without rotation, in cells."""
        return RADIUS[self.size] * self.scale

    @property
    def name(self) -> str:
        """The noun: "circle", or "digit seven"."""
        return self.shape if self.digit is None else f"digit {DIGITS[self.digit]}"

    @property
    def place(self) -> str:
        """One of nine places: "top left", "center", ..."""
        return _PLACES[self.row][self.column]


@dataclass(frozen=True)
class Camera:
    """Blur and noise of a camera."""

    blur: float  # standard deviation, in cells
    noise: float  # standard deviation, of 0 to 1
    seed: int

    def take(self, picture: Image.Image) -> Image.Image:
        """Add blur and noise to an image; the size stays."""
        soft = picture.filter(ImageFilter.GaussianBlur(self.blur * picture.width / BOARD))
        grain = np.random.default_rng(self.seed).normal(size=(*soft.size[::-1], 3))
        pixels = np.asarray(soft) + 255 * self.noise * grain
        return Image.fromarray(np.clip(pixels.round(), 0, 255).astype(np.uint8))


@dataclass(frozen=True)
class Scene:
    """Things in reading order; no two share both colour and name."""

    things: tuple[Thing, ...]
    ground: Background | Tiles | None = None  # None = paper
    camera: Camera | None = None  # None = a perfect one

    def render(self, size: int = 192) -> Image.Image:
        """Draw the scene on a square RGB canvas of `size` pixels."""
        picture = draw(self.things, size, BOARD, self.ground)
        return picture if self.camera is None else self.camera.take(picture)

    def facts(self) -> tuple[tuple[str, str, str, str], ...]:
        """Return (size, colour, name, place) of every thing."""
        return tuple((t.size, t.colour, t.name, t.place) for t in self.things)

    @property
    def split(self) -> Split:
        """The split ("train" or "held-out"), a hash of the facts."""
        key = zlib.crc32(repr(self.facts()).encode())
        return "held-out" if key % _HELD_OUT_ONE_IN == 0 else "train"


BUNDLED = Scene(  # of scene.png
    (
        Thing("star", "orange", "large", 0, 0, shift=(0.02, 0.03)),
        Thing("digit", "purple", "large", 1, 1, 3, shift=(0.03, -0.02)),
        Thing("ring", "green", "small", 2, 2, shift=(-0.04, 0.0)),
    )
)


def sample(seed: int, style: Style = "plain") -> Scene:
    """Sample a scene. A seed gives the same scene on every machine.

    "textured" places the things of "plain" anywhere in their cells, rotates and scales them, and
    adds a textured background and camera noise. "tiled" leaves the things as in "plain": pale tiles
    behind them, textured tiles in empty cells.
    """
    scene, generator = _plain(seed), np.random.default_rng((seed, 5))
    match style:
        case "plain":
            return scene
        case "textured":
            return add_texture(scene, generator)
        case "tiled":
            return add_tiles(scene, generator)


def add_texture(scene: Scene, generator: np.random.Generator) -> Scene:
    """Jitter the things of a scene, and add a background and a camera."""
    things: list[Thing] = []
    while len(things) < len(scene.things):
        loose = _jitter_thing(scene.things[len(things)], generator)
        if all(_is_separate(loose, other) for other in things):
            things.append(loose)
        elif generator.random() < 0.05:  # little space is left: restart
            things.clear()
    below = sample_background(generator, [RGB[thing.colour] for thing in things])
    blur, noise = generator.uniform(0, _BLUR), generator.uniform(0, _NOISE)
    camera = Camera(float(blur), float(noise), int(generator.integers(1 << 31)))
    return Scene(tuple(things), below, camera)


def add_tiles(scene: Scene, generator: np.random.Generator) -> Scene:
    """Add tiles to a scene: pale ones behind its things, textured ones in empty cells."""
    inks = {BOARD * thing.row + thing.column: RGB[thing.colour] for thing in scene.things}
    below = (
        sample_tint(generator, inks[place])
        if place in inks
        else sample_background(generator, (), PATTERNED)
        for place in range(BOARD**2)
    )
    return replace(scene, ground=Tiles(tuple(below)))


def _jitter_thing(thing: Thing, generator: np.random.Generator) -> Thing:
    scale = float(generator.uniform(1 - _SCALE, 1 + _SCALE))
    turn = float(generator.uniform(-_TURN, _TURN))
    radius = 1.06 * RADIUS[thing.size] * scale  # of a star, the largest shape
    x, y = (_sample_shift(at, radius, generator) for at in (thing.column, thing.row))
    return replace(thing, shift=(x, y), scale=scale, turn=turn)


def _sample_shift(at: int, radius: float, generator: np.random.Generator) -> float:
    """Sample a displacement that keeps a thing within the image."""
    first = max(-_TEXTURED_SHIFT, radius + _EDGE - at - 0.5)
    last = min(_TEXTURED_SHIFT, BOARD - at - 0.5 - radius - _EDGE)
    return float(generator.uniform(first, last))


def _is_separate(one: Thing, other: Thing) -> bool:
    across = one.column + one.shift[0] - other.column - other.shift[0]
    down = one.row + one.shift[1] - other.row - other.shift[1]
    return math.hypot(across, down) > one.radius + other.radius + _GAP


def _plain(seed: int) -> Scene:
    generator = np.random.default_rng(seed)
    count = 1 + int(generator.choice(len(_COUNT_PROBABILITIES), p=_COUNT_PROBABILITIES))
    return sample_board(generator, count)


def sample_board(
    generator: np.random.Generator, count: int, digit_rate: float = _DIGIT_RATE
) -> Scene:
    """Sample a plain scene of `count` things, at most 9; a share of them are digits."""
    cells = sorted(int(c) for c in generator.choice(BOARD * BOARD, count, replace=False))
    things: list[Thing] = []
    for cell in cells:
        thing = sample_thing(generator, cell, digit_rate)
        while any((t.colour, t.name) == (thing.colour, thing.name) for t in things):
            thing = sample_thing(generator, cell, digit_rate)
        things.append(thing)
    return Scene(tuple(things))


def sample_thing(
    generator: np.random.Generator, cell: int, digit_rate: float = _DIGIT_RATE
) -> Thing:
    """Sample a shape or a digit for a cell (0 to 8, in reading order)."""
    is_digit = generator.random() < digit_rate
    digit = int(generator.integers(10))
    shape = SHAPES[generator.integers(len(SHAPES))]
    colour = COLOURS[generator.integers(len(COLOURS))]
    size = SIZES[generator.integers(len(SIZES))]
    x, y = (float(v) for v in generator.uniform(-_SHIFT, _SHIFT, 2))
    return Thing(
        "digit" if is_digit else shape,
        colour,
        size,
        *divmod(cell, BOARD),
        digit if is_digit else None,
        (x, y),
    )
