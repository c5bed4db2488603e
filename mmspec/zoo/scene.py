"""The Scene world: coloured shapes and written digits on a canvas, drawn from an integer seed.

A scene is data: a tuple of things on a 3 x 3 board. Everything else (pictures, sentences, facts) is
computed from it, so that what a model says about a picture can be checked word by word.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from mmspec.zoo.drawing import draw

Split = Literal["train", "held-out"]

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

    @property
    def name(self) -> str:
        """The noun: "circle", or "digit seven"."""
        return self.shape if self.digit is None else f"digit {DIGITS[self.digit]}"

    @property
    def place(self) -> str:
        """Where it is, as one of nine places: "top left", "center", ..."""
        return _PLACES[self.row][self.column]


@dataclass(frozen=True)
class Scene:
    """Some things, in reading order. No two of them share both colour and name."""

    things: tuple[Thing, ...]

    def render(self, size: int = 192) -> Image.Image:
        """Draw the scene on a square RGB canvas of `size` pixels."""
        return draw(self.things, size, BOARD)

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


def sample(seed: int) -> Scene:
    """Draw a scene. The same seed gives the same scene on every machine."""
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
