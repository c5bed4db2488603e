"""Draw things: anti-aliased shapes and stroked digits, identical on every machine.

Digits are strokes defined here, since fonts differ between versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from mmspec.zoo.backgrounds import Background, Tiles
    from mmspec.zoo.scene import Thing

Point = tuple[float, float]

RGB = {
    "red": (215, 38, 41),
    "green": (42, 157, 63),
    "blue": (34, 84, 214),
    "yellow": (245, 206, 24),
    "orange": (244, 128, 18),
    "purple": (122, 46, 168),
    "pink": (246, 138, 186),
    "black": (28, 28, 30),
}
PAPER = (247, 244, 236)
RADIUS = {"small": 0.27, "large": 0.42}  # half the height, in cells

_OVERSAMPLING = 4
_STROKE = 0.30  # stroke width of a digit, in radii

# Strokes in a box with x in [-0.6, 0.6] and y in [-1, 1], y pointing down.
_STROKES: dict[int, tuple[tuple[Point, ...], ...]] = {
    1: (((-0.4, -0.5), (0.1, -0.85), (0.1, 0.85)), ((-0.35, 0.85), (0.5, 0.85))),
    4: (((0.3, 0.85), (0.3, -0.85), (-0.55, 0.35), (0.6, 0.35)),),
    7: (((-0.55, -0.85), (0.55, -0.85), (-0.15, 0.85)),),
}


def draw(
    things: Iterable[Thing], size: int, board: int, ground: Background | Tiles | None = None
) -> Image.Image:
    """Draw things on a `board` x `board` grid filling a square canvas of `size` pixels.

    Without a background the canvas has the colour of paper.
    """
    big = (size * _OVERSAMPLING, size * _OVERSAMPLING)
    if ground is None:
        canvas = Image.new("RGB", big, PAPER)
    else:
        canvas = ground.paint(size).resize(big, Image.Resampling.BICUBIC)
    cell = big[0] / board
    for thing in things:
        x = (thing.column + 0.5 + thing.shift[0]) * cell
        y = (thing.row + 0.5 + thing.shift[1]) * cell
        mask = Image.new("1", big)
        cover(ImageDraw.Draw(mask), thing, x, y, thing.radius * cell)
        canvas.paste(RGB[thing.colour], mask=mask)
    return canvas.resize((size, size), Image.Resampling.BICUBIC)


def cover(pen: ImageDraw.ImageDraw, thing: Thing, x: float, y: float, r: float) -> None:
    """Fill the pixels that a thing covers."""
    turn = math.radians(thing.turn)
    across, down = r * math.cos(turn), r * math.sin(turn)

    def transform(points: Iterable[Point]) -> list[Point]:
        return [(x + across * u - down * v, y + down * u + across * v) for u, v in points]

    if thing.digit is not None:
        width = max(1, round(_STROKE * r))
        for stroke in strokes(thing.digit):
            _stroke(pen, transform(stroke), width)
    elif thing.shape == "circle":
        pen.ellipse(_box(x, y, r), fill=1)
    elif thing.shape == "ring":
        pen.ellipse(_box(x, y, r), fill=1)
        pen.ellipse(_box(x, y, 0.52 * r), fill=0)
    else:
        pen.polygon(transform(_outline(thing.shape)), fill=1)


def _box(x: float, y: float, r: float) -> tuple[float, float, float, float]:
    return (x - r, y - r, x + r, y + r)


def _outline(shape: str) -> list[Point]:
    match shape:
        case "square":
            return [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)]
        case "triangle":
            return [(0.0, -1.0), (1.0, 0.85), (-1.0, 0.85)]
        case "diamond":
            return [(0.0, -1.05), (0.72, 0.0), (0.0, 1.05), (-0.72, 0.0)]
        case "cross":
            a, b = 0.3, 1.0
            return [
                (-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a),
                (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a),
            ]  # fmt: skip
        case "star":
            radii = [1.05 if i % 2 == 0 else 0.42 for i in range(10)]
            return [
                (q * math.sin(math.pi * i / 5), -q * math.cos(math.pi * i / 5))
                for i, q in enumerate(radii)
            ]
    raise ValueError(f"no outline for shape {shape!r}")


def strokes(digit: int) -> tuple[tuple[Point, ...], ...]:
    """Return the strokes of a digit: x in [-0.6, 0.6], y in [-1, 1], y pointing down."""
    match digit:
        case 0:
            return (_arc(0.0, 0.0, 0.5, 0.85, 0, 360),)
        case 2:
            top = _arc(0.0, -0.4, 0.5, 0.45, -170, 40)
            return ((*top, (-0.5, 0.85), (0.6, 0.85)),)
        case 3:
            top = _arc(-0.05, -0.43, 0.5, 0.42, -150, 90)
            return (top, _arc(-0.05, 0.43, 0.55, 0.44, -90, 150))
        case 5:
            bowl = _arc(-0.05, 0.33, 0.55, 0.53, -120, 140)
            return (((0.5, -0.85), (-0.4, -0.85), (-0.45, -0.05), *bowl),)
        case 6:
            tail = _arc(0.3, 0.35, 0.8, 1.2, -165, -90)
            return (_arc(0.0, 0.38, 0.5, 0.47, 0, 360), tail)
        case 8:
            return (_arc(0.0, -0.43, 0.42, 0.42, 0, 360), _arc(0.0, 0.42, 0.52, 0.44, 0, 360))
        case 9:
            tail = _arc(-0.3, -0.35, 0.8, 1.2, 15, 90)
            return (_arc(0.0, -0.38, 0.5, 0.47, 0, 360), tail)
    return _STROKES[digit]


def _arc(
    x: float, y: float, rx: float, ry: float, start_deg: float, stop_deg: float
) -> tuple[Point, ...]:
    """Return points along an ellipse, clockwise; zero degrees points right."""
    angles = [math.radians(start_deg + (stop_deg - start_deg) * i / 24) for i in range(25)]
    return tuple((x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles)


def _stroke(pen: ImageDraw.ImageDraw, points: list[Point], width: int) -> None:
    pen.line(points, fill=1, width=width, joint="curve")
    for x, y in points:
        pen.ellipse(_box(x, y, width / 2), fill=1)
