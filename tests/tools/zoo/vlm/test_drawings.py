"""Flat drawings: multimodal models name what is on them.

The drawings are made here by plain calls of PIL, and share nothing with what the models learned
from: not its colours, proportions, sizes or places.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.random import Generator
from PIL import Image, ImageColor, ImageDraw

from mmspec.zoo.catalogue import load, processor
from mmspec.zoo.facts import find_mentions
from mmspec.zoo.language import format_prompt

DRAWINGS = 200
INKS = {  # names of PIL that a person calls by this word
    "red": ("red", "crimson", "#d01010"),
    "green": ("green", "forestgreen", "limegreen"),
    "blue": ("blue", "royalblue", "mediumblue"),
    "yellow": ("yellow", "gold", "#f5e020"),
    "orange": ("orange", "darkorange", "#ff8c1a"),
    "purple": ("purple", "darkviolet", "rebeccapurple"),
    "pink": ("pink", "hotpink", "lightpink"),
    "black": ("black", "#181818", "#0a0a14"),
}
GROUNDS = ("white", "gray", "lightgray", "beige", "lightblue", "darkslategray", "ivory", "tan")
SEEN = 110  # least distance of a ground to an ink, in bytes
ROWS, COLUMNS = ("top", "", "bottom"), ("left", "", "right")

Pen = ImageDraw.ImageDraw
Fact = tuple[str, str, str]  # shape, colour, place


@dataclass(frozen=True)
class Drawing:
    """A file's bytes, and what is on it."""

    data: bytes
    facts: tuple[Fact, ...]

    def open(self) -> Image.Image:
        return Image.open(io.BytesIO(self.data)).convert("RGB")


def drawing(generator: Generator) -> Drawing:
    """One thing, or now and then two, on a canvas of 40 to 512 pixels, as PNG or JPEG."""
    side = int(generator.integers(40, 513))
    count = 1 + int(generator.random() < 0.3)
    colours = [str(c) for c in generator.permutation(list(INKS))[:count]]
    inks = [str(generator.choice(INKS[colour])) for colour in colours]
    picture = Image.new("RGB", (side, side), _ground(inks, generator))
    pen, facts = ImageDraw.Draw(picture), []
    for colour, ink, (x, y, r) in zip(colours, inks, _spots(count, generator), strict=True):
        shape = str(generator.choice(list(PENS)))
        PENS[shape](pen, x * side, y * side, r * side, ink, generator)
        facts.append((shape, colour, place(x, y)))
    return Drawing(_written(picture, generator), tuple(facts))


def place(x: float, y: float) -> str:
    """The nearest of nine places."""
    row, column = ROWS[int(3 * y)], COLUMNS[int(3 * x)]
    return f"{row} {column}".strip() or "center"


def _spots(count: int, generator: Generator) -> list[tuple[float, float, float]]:
    """Middles and radii, in sides: on the canvas, apart, and not on a line between two places."""
    while True:
        found: list[tuple[float, float, float]] = []
        for _ in range(count):
            r = float(generator.uniform(0.1, 0.36 if count == 1 else 0.2))
            x, y = (float(v) for v in generator.uniform(r + 0.01, 0.99 - r, 2))
            found.append((x, y, r))
        lines = [abs(v - line) for x, y, _ in found for v in (x, y) for line in (1 / 3, 2 / 3)]
        (x, y, r), (u, v, q) = found[0], found[-1]
        is_apart = count == 1 or math.hypot(x - u, y - v) > 1.2 * (r + q)
        if is_apart and min(lines) > 0.04 and (count == 1 or place(x, y) != place(u, v)):
            return found


def _ground(inks: list[str], generator: Generator) -> tuple[int, int, int]:
    """A named colour or any other, on which all inks can be seen."""
    while True:
        named = ImageColor.getrgb(str(generator.choice(GROUNDS)))
        any_colour = generator.integers(0, 256, 3)
        red, green, blue = (named if generator.random() < 0.5 else any_colour)[:3]
        if all(math.dist(ImageColor.getrgb(ink), (red, green, blue)) > SEEN for ink in inks):
            return int(red), int(green), int(blue)


def _written(picture: Image.Image, generator: Generator) -> bytes:
    file = io.BytesIO()
    if generator.random() < 0.5:
        picture.save(file, "PNG")
    else:
        picture.save(file, "JPEG", quality=int(generator.integers(70, 96)))
    return file.getvalue()


def _circle(pen: Pen, x: float, y: float, r: float, ink: str, some: Generator) -> None:
    pen.ellipse((x - r, y - r, x + r, y + r), fill=ink)


def _square(pen: Pen, x: float, y: float, r: float, ink: str, some: Generator) -> None:
    s = 0.85 * r
    pen.rectangle((x - s, y - s, x + s, y + s), fill=ink)


def _triangle(pen: Pen, x: float, y: float, r: float, ink: str, some: Generator) -> None:
    w = r * some.uniform(0.85, 1.1)
    pen.polygon([(x, y - r), (x - w, y + 0.9 * r), (x + w, y + 0.9 * r)], fill=ink)


def _star(pen: Pen, x: float, y: float, r: float, ink: str, some: Generator) -> None:
    inner = some.uniform(0.38, 0.48)
    spikes = [(r if i % 2 == 0 else inner * r, math.pi * (i / 5 - 0.5)) for i in range(10)]
    pen.polygon([(x + q * math.cos(a), y + q * math.sin(a)) for q, a in spikes], fill=ink)


def _cross(pen: Pen, x: float, y: float, r: float, ink: str, some: Generator) -> None:
    w = r * some.uniform(0.25, 0.38)
    pen.rectangle((x - w, y - r, x + w, y + r), fill=ink)
    pen.rectangle((x - r, y - w, x + r, y + w), fill=ink)


def _ring(pen: Pen, x: float, y: float, r: float, ink: str, some: Generator) -> None:
    width = max(2, round(r * some.uniform(0.3, 0.5)))
    pen.ellipse((x - r, y - r, x + r, y + r), outline=ink, width=width)


def _diamond(pen: Pen, x: float, y: float, r: float, ink: str, some: Generator) -> None:
    w = r * some.uniform(0.6, 0.95)
    pen.polygon([(x, y - r), (x + w, y), (x, y + r), (x - w, y)], fill=ink)


PENS = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
    "diamond": _diamond,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_shape_colour_and_rough_place_of_a_drawing_are_named(name: str) -> None:
    generator = np.random.default_rng(7)
    drawings = [drawing(generator) for _ in range(DRAWINGS)]
    said = described(name, [one.open() for one in drawings])
    found = shares(drawings, said)
    assert found["drawings"] >= 0.9, found
    assert shares(drawings, [*said[1:], said[0]])["drawings"] < 0.1  # of another drawing
    empty = [Image.new("RGB", (96, 96), ground) for ground in GROUNDS]
    assert shares(drawings[: len(empty)], described(name, empty))["drawings"] == 0


def described(
    name: str, pictures: list[Image.Image], prompt: str = "describe the picture."
) -> list[str]:
    """What a checkpoint says of pictures, greedily."""
    model, reads = load(name), processor(name)
    said: list[str] = []
    for start in range(0, len(pictures), 50):
        part = pictures[start : start + 50]
        inputs = reads(
            text=[format_prompt(reads, prompt)] * len(part), images=part, return_tensors="pt"
        )
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1] :]
        said += reads.batch_decode(new, skip_special_tokens=True)
    return said


def shares(drawings: list[Drawing], said: list[str]) -> dict[str, float]:
    """Of things, whose shape, colour, place is told; of drawings, on which all is right."""
    right, things, whole = {"shape": 0, "colour": 0, "place": 0}, 0, 0
    for one, text in zip(drawings, said, strict=True):
        told = [(m.name, m.colour or "", m.place or "") for m in find_mentions(text)]
        whole += sorted(told) == sorted(one.facts)
        things += len(one.facts)
        for fact in one.facts:
            best = max(told, key=lambda t: sum(map(str.__eq__, t, fact)), default=("", "", ""))
            for i, kind in enumerate(right):
                right[kind] += best[i] == fact[i]
    return {kind: n / things for kind, n in right.items()} | {"drawings": whole / len(drawings)}
