"""Flat drawings for data augmentation: things anywhere, on a background of one colour.

Sizes, proportions and tones of things vary, contours are optional; canvases have any size, some are
not square, some are compressed as JPEG. Everything is sampled from a seeded generator.
"""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from mmspec.zoo.drawing import Point, strokes
from mmspec.zoo.scene import BOARD, COLOURS, DIGITS, SHAPES, Scene, Thing
from mmspec.zoo.scene_tensors import PIXELS

Colour = tuple[int, int, int]
Spot = tuple[float, float, float]  # middle and half the height, in cells

_COUNT_PROBABILITIES = (0.5, 0.3, 0.12, 0.08)  # of one to four things
_DIGIT_RATE = 0.15
_RADII = {1: (0.24, 1.3), 2: (0.22, 0.75), 3: (0.2, 0.5), 4: (0.2, 0.42)}  # by things, in cells
_LARGE = 0.34  # minimum radius of a large thing, in cells
_MIN_CONTRAST = 85.0  # minimum distance of the background to an ink, in bytes
_SIDES = (40, 320)  # of a canvas, in pixels
_STRETCH_RATE, _STRETCH = 0.25, 1.5  # share of canvases that are not square, maximum aspect ratio
_CONTOUR, _JPEG, _GREY = 0.15, 0.4, 0.3  # probabilities
_TURN = 0.25  # maximum rotation in radians
_TONES = {  # hue in degrees, saturation, value: from and to
    "red": ((-9, 9), (0.75, 1), (0.6, 1)),
    "green": ((88, 155), (0.5, 1), (0.35, 1)),
    "blue": ((206, 246), (0.6, 1), (0.45, 1)),
    "yellow": ((46, 63), (0.65, 1), (0.85, 1)),
    "orange": ((20, 40), (0.75, 1), (0.85, 1)),
    "purple": ((264, 304), (0.45, 1), (0.35, 0.9)),
    "pink": ((322, 356), (0.18, 0.65), (0.88, 1)),
    "black": ((0, 360), (0, 1), (0, 0.17)),
}


def sample_drawing(generator: np.random.Generator) -> tuple[np.ndarray, Scene]:
    """Sample a drawing, (P, P, 3) bytes, and a plain scene of the same facts."""
    width = height = int(generator.integers(*_SIDES))
    if generator.random() < _STRETCH_RATE:
        width = round(width * generator.uniform(1, _STRETCH))
        width, height = (width, height) if generator.random() < 0.5 else (height, width)
    spots = _spots(generator)
    things = _things(spots, generator)
    inks = [_tone(thing.colour, generator) for thing in things]
    canvas = Image.new("RGB", (width, height), _ground(inks, generator))
    pen = ImageDraw.Draw(canvas)
    for thing, spot, ink in zip(things, spots, inks, strict=True):
        _draw(pen, thing, spot, ink, (width, height), generator)
    if generator.random() < _JPEG:
        canvas = _as_jpeg(canvas, int(generator.integers(60, 96)))
    small = canvas.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
    order = sorted(things, key=lambda thing: (thing.row, thing.column))
    return np.array(small), Scene(tuple(order))


def _spots(generator: np.random.Generator) -> list[Spot]:
    """Sample positions of things: on the canvas, separate, in different cells."""
    count = 1 + int(generator.choice(len(_COUNT_PROBABILITIES), p=_COUNT_PROBABILITIES))
    found: list[Spot] = []
    for _ in range(200):
        r = float(generator.uniform(*_RADII[count]))
        x, y = (float(v) for v in generator.uniform(r, BOARD - r, 2))
        if all(_is_separate((x, y, r), other) for other in found):
            found.append((x, y, r))
        if len(found) == count:
            break
    return found


def _is_separate(one: Spot, other: Spot) -> bool:
    cells = [(int(x), int(y)) for x, y, _ in (one, other)]
    distance = math.hypot(one[0] - other[0], one[1] - other[1])
    return cells[0] != cells[1] and distance > 1.1 * (one[2] + other[2])


def _things(spots: Sequence[Spot], generator: np.random.Generator) -> list[Thing]:
    """Sample things; no two share both colour and name."""
    found: list[Thing] = []
    while len(found) < len(spots):
        x, y, r = spots[len(found)]
        digit = int(generator.integers(len(DIGITS))) if generator.random() < _DIGIT_RATE else None
        shape = "digit" if digit is not None else SHAPES[generator.integers(len(SHAPES))]
        colour, size = COLOURS[generator.integers(len(COLOURS))], "large" if r > _LARGE else "small"
        thing = Thing(shape, colour, size, int(y), int(x), digit)
        if all((thing.colour, thing.name) != (one.colour, one.name) for one in found):
            found.append(thing)
    return found


def _tone(colour: str, generator: np.random.Generator) -> Colour:
    """Sample an ink within the range of a colour name."""
    hue, saturation, value = (float(generator.uniform(*range_)) for range_ in _TONES[colour])
    return _bytes(colorsys.hsv_to_rgb(hue / 360 % 1, saturation, value))


def _ground(inks: Sequence[Colour], generator: np.random.Generator) -> Colour:
    """Sample a background colour, often grey, on which all inks are visible."""
    while True:
        grey = [min(1.0, float(generator.uniform(0, 1.3)))] * 3
        tone = grey if generator.random() < _GREY else list(generator.uniform(0, 1, 3))
        found = _bytes(tone)
        if all(math.dist(found, ink) > _MIN_CONTRAST for ink in inks):
            return found


def _bytes(tone: Sequence[float]) -> Colour:
    red, green, blue = (round(255 * float(value)) for value in tone)
    return red, green, blue


def _draw(
    pen: ImageDraw.ImageDraw,
    thing: Thing,
    spot: Spot,
    ink: Colour,
    size: tuple[int, int],
    generator: np.random.Generator,
) -> None:
    """Draw a thing with sampled proportions, without anti-aliasing."""
    u, v = (float(q) for q in generator.uniform(0.86, 1, 2))
    angle = float(generator.uniform(-_TURN, _TURN)) * (generator.random() < 0.5)
    x, y, r = spot
    cell = min(size) / BOARD

    def transform(points: Sequence[Point]) -> list[Point]:
        c, s = math.cos(angle) * r * cell, math.sin(angle) * r * cell
        mx, my = x * size[0] / BOARD, y * size[1] / BOARD
        return [(mx + c * u * a - s * v * b, my + s * u * a + c * v * b) for a, b in points]

    if thing.digit is not None:
        width = max(2, round(r * cell * float(generator.uniform(0.2, 0.36))))
        for stroke in strokes(thing.digit):
            pen.line(transform(stroke), fill=ink, width=width, joint="curve")
        return
    edge = transform(_contour(thing.shape, generator))
    if thing.shape == "ring":
        inner = transform(_round(float(generator.uniform(0.4, 0.75))))
        mask = Image.new("1", size)
        hole = ImageDraw.Draw(mask)
        hole.polygon(edge, fill=1)
        hole.polygon(inner, fill=0)
        pen.bitmap((0, 0), mask, fill=ink)
        return
    pen.polygon(edge, fill=ink)
    if generator.random() < _CONTOUR:
        line = max(1, round(cell * r * float(generator.uniform(0.02, 0.12))))
        grey = round(255 * float(generator.choice([0, 0, 0.2, 1])))
        pen.line([*edge, *edge[:2]], fill=(grey, grey, grey), width=line, joint="curve")


def _contour(shape: str, generator: np.random.Generator) -> list[Point]:
    """Sample the outline of a shape in a box of half height one."""
    match shape:
        case "circle" | "ring":
            return _round(1.0)
        case "square":
            a = float(generator.uniform(0.8, 1))
            return [(-a, -a), (a, -a), (a, a), (-a, a)]
        case "triangle":
            foot, tip = float(generator.uniform(0.75, 1)), float(generator.uniform(-0.3, 0.3))
            return [(tip, -1.0), (1.0, foot), (-1.0, foot)]
        case "diamond":
            a = float(generator.uniform(0.55, 1.08))
            return [(0.0, -1.0), (a, 0.0), (0.0, 1.0), (-a, 0.0)]
        case "cross":
            a, b = float(generator.uniform(0.18, 0.42)), 1.0
            return [
                (-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a),
                (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a),
            ]  # fmt: skip
        case "star":
            inner = float(generator.uniform(0.32, 0.52))
            return [
                (q * math.sin(math.pi * i / 5), -q * math.cos(math.pi * i / 5))
                for i, q in enumerate([1.0, inner] * 5)
            ]
    raise ValueError(f"no contour for shape {shape!r}")


def _round(radius: float) -> list[Point]:
    angles = [math.pi * i / 20 for i in range(40)]
    return [(radius * math.cos(a), radius * math.sin(a)) for a in angles]


def _as_jpeg(picture: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")
