"""The Scene world: coloured shapes and written digits on a canvas, drawn from an integer seed.

A scene is data: a tuple of things on a 3 x 3 board. Everything else (pictures, sentences, facts) is
computed from it, so that what a model says about a picture can be checked word by word.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image, ImageFilter

from mmspec.zoo.drawing import RADIUS, RGB, draw
from mmspec.zoo.grounds import PATTERNED, Ground, Tiles, ground, tint

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
_COUNT_LAW = (0.08, 0.27, 0.40, 0.25)  # how often a scene has one, two, three, four things
_DIGIT_RATE = 0.35
_SHIFT = 0.06  # largest displacement from the middle of a cell, in cells
_FREE = 0.36  # the same in textured scenes
_SCALE = 0.08  # how much things of a size differ there, at most
_TURN = 12.0  # how far they are turned there at most, in degrees
_EDGE, _GAP = 0.04, 0.12  # least room to the edge, and between two things, in cells
_BLUR, _NOISE = 0.035, 0.03  # of the camera there, at most
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
    scale: float = 1.0  # how large it is among those of its size
    turn: float = 0.0  # degrees, clockwise

    @property
    def radius(self) -> float:
        """Half the height of one that stands upright, in cells."""
        return RADIUS[self.size] * self.scale

    @property
    def name(self) -> str:
        """The noun: "circle", or "digit seven"."""
        return self.shape if self.digit is None else f"digit {DIGITS[self.digit]}"

    @property
    def place(self) -> str:
        """Where it is, as one of nine places: "top left", "center", ..."""
        return _PLACES[self.row][self.column]


@dataclass(frozen=True)
class Camera:
    """What a lens and a sensor add to a picture."""

    blur: float  # standard deviation, in cells
    noise: float  # standard deviation, of 0 to 1
    seed: int

    def take(self, picture: Image.Image) -> Image.Image:
        """The picture as it comes out, of the same size."""
        soft = picture.filter(ImageFilter.GaussianBlur(self.blur * picture.width / BOARD))
        grain = np.random.default_rng(self.seed).normal(size=(*soft.size[::-1], 3))
        pixels = np.asarray(soft) + 255 * self.noise * grain
        return Image.fromarray(np.clip(pixels.round(), 0, 255).astype(np.uint8))


@dataclass(frozen=True)
class Scene:
    """Some things, in reading order. No two of them share both colour and name."""

    things: tuple[Thing, ...]
    ground: Ground | Tiles | None = None  # None = paper
    camera: Camera | None = None  # None = a perfect one

    def render(self, size: int = 192) -> Image.Image:
        """Draw the scene on a square RGB canvas of `size` pixels."""
        picture = draw(self.things, size, BOARD, self.ground)
        return picture if self.camera is None else self.camera.take(picture)

    def facts(self) -> tuple[tuple[str, str, str, str], ...]:
        """What is true of the picture: (size, colour, name, place) of every thing."""
        return tuple((t.size, t.colour, t.name, t.place) for t in self.things)

    @property
    def split(self) -> Split:
        """The side of the train / held-out division this scene falls on, by its facts alone."""
        key = zlib.crc32(repr(self.facts()).encode())
        return "held-out" if key % _HELD_OUT_ONE_IN == 0 else "train"


BUNDLED = Scene(  # the picture shipped as scene.png
    (
        Thing("star", "orange", "large", 0, 0, shift=(0.02, 0.03)),
        Thing("digit", "purple", "large", 1, 1, 3, shift=(0.03, -0.02)),
        Thing("ring", "green", "small", 2, 2, shift=(-0.04, 0.0)),
    )
)


def sample(seed: int, style: Style = "plain") -> Scene:
    """Draw a scene. The same seed gives the same scene on every machine.

    "textured" has the things of "plain" at free places of their cells, turned and of many sizes,
    on a material, and taken with a camera. "tiled" has them where they are in "plain", on pale
    tiles, and a material of its own in every place where nothing stands.
    """
    scene, generator = _plain(seed), np.random.default_rng((seed, 5))
    match style:
        case "plain":
            return scene
        case "textured":
            return textured(scene, generator)
        case "tiled":
            return tiled(scene, generator)


def textured(scene: Scene, generator: np.random.Generator) -> Scene:
    """The things of a scene at free places of their cells, on some ground."""
    things: list[Thing] = []
    while len(things) < len(scene.things):
        loose = _loosened(scene.things[len(things)], generator)
        if all(_apart(loose, other) for other in things):
            things.append(loose)
        elif generator.random() < 0.05:  # hardly any room is left
            things.clear()
    below = ground(generator, [RGB[thing.colour] for thing in things])
    blur, noise = generator.uniform(0, _BLUR), generator.uniform(0, _NOISE)
    camera = Camera(float(blur), float(noise), int(generator.integers(1 << 31)))
    return Scene(tuple(things), below, camera)


def tiled(scene: Scene, generator: np.random.Generator) -> Scene:
    """A scene on tiles: pale ones below its things, some material in all other places."""
    inks = {BOARD * thing.row + thing.column: RGB[thing.colour] for thing in scene.things}
    below = (
        tint(generator, inks[place]) if place in inks else ground(generator, (), PATTERNED)
        for place in range(BOARD**2)
    )
    return replace(scene, ground=Tiles(tuple(below)))


def _loosened(thing: Thing, generator: np.random.Generator) -> Thing:
    scale = float(generator.uniform(1 - _SCALE, 1 + _SCALE))
    turn = float(generator.uniform(-_TURN, _TURN))
    radius = 1.06 * RADIUS[thing.size] * scale  # of what reaches farthest, a star
    x, y = (_free(at, radius, generator) for at in (thing.column, thing.row))
    return replace(thing, shift=(x, y), scale=scale, turn=turn)


def _free(at: int, radius: float, generator: np.random.Generator) -> float:
    """A displacement that keeps a thing on the canvas."""
    first = max(-_FREE, radius + _EDGE - at - 0.5)
    last = min(_FREE, BOARD - at - 0.5 - radius - _EDGE)
    return float(generator.uniform(first, last))


def _apart(one: Thing, other: Thing) -> bool:
    across = one.column + one.shift[0] - other.column - other.shift[0]
    down = one.row + one.shift[1] - other.row - other.shift[1]
    return math.hypot(across, down) > one.radius + other.radius + _GAP


def _plain(seed: int) -> Scene:
    generator = np.random.default_rng(seed)
    count = 1 + int(generator.choice(len(_COUNT_LAW), p=_COUNT_LAW))
    cells = sorted(int(c) for c in generator.choice(BOARD * BOARD, count, replace=False))
    things: list[Thing] = []
    for cell in cells:
        thing = _thing(generator, cell)
        while any((t.colour, t.name) == (thing.colour, thing.name) for t in things):
            thing = _thing(generator, cell)
        things.append(thing)
    return Scene(tuple(things))


def _thing(generator: np.random.Generator, cell: int) -> Thing:
    is_digit = generator.random() < _DIGIT_RATE
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
