"""What things stand on: materials painted from a seed, so that no place of a picture is blank.

Clouds, grass, bricks, water and sand are noise whose power falls with frequency, and a pattern on
it; a flat ground is one colour with a faint slope of light. Tones are seeded and kept away from the
inks of the things that stand there, so that everything can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

RGB = tuple[float, float, float]
Field = np.ndarray  # (S, S), about 0 to 1

_GRAIN = 96  # cells a side of the noise, whatever the size of the picture
_APART = 0.42  # least distance of a tone to an ink, in the unit cube of RGB
_PALE, _CLEAR = 0.8, 0.48  # of tints: least of a channel, least distance to an ink
_CHANGE = 0.07  # how far tones of a material vary, per channel


@dataclass(frozen=True)
class Ground:
    """A material in two tones, its pattern drawn from `seed`."""

    material: str
    dark: RGB  # 0 to 1
    light: RGB
    seed: int

    def paint(self, side: int) -> Image.Image:
        """The ground on a square RGB canvas of `side` pixels."""
        share = _PATTERNS[self.material](np.random.default_rng(self.seed))[..., None]
        dark, light = np.array(self.dark), np.array(self.light)
        pixels = np.clip(dark + (light - dark) * share, 0, 1)
        picture = Image.fromarray((255 * pixels).round().astype(np.uint8))
        return picture.resize((side, side), Image.Resampling.BICUBIC)


@dataclass(frozen=True)
class Tiles:
    """Every place of a square board painted with a ground of its own, row by row."""

    grounds: tuple[Ground, ...]

    def paint(self, side: int) -> Image.Image:
        """The tiles on a square RGB canvas of `side` pixels."""
        canvas, across = Image.new("RGB", (side, side)), math.isqrt(len(self.grounds))
        edges = [round(side * cut / across) for cut in range(across + 1)]
        for place, below in enumerate(self.grounds):
            row, column = divmod(place, across)
            high, wide = edges[row + 1] - edges[row], edges[column + 1] - edges[column]
            tile = below.paint(max(high, wide)).crop((0, 0, wide, high))
            canvas.paste(tile, (edges[column], edges[row]))
        return canvas


def tint(generator: np.random.Generator, ink: tuple[int, int, int]) -> Ground:
    """A pale flat ground on which an ink (0 to 255) can be seen."""
    seen = np.array(ink) / 255
    while True:
        tone = generator.uniform(_PALE, 1.0, 3)
        if np.linalg.norm(tone - seen) > _CLEAR:
            return Ground("flat", _colour(tone), _colour(tone), int(generator.integers(1 << 31)))


def ground(
    generator: np.random.Generator,
    inks: Sequence[tuple[int, int, int]],
    materials: Sequence[str] | None = None,
) -> Ground:
    """Some material (of these, if any are named) on which all `inks` (0 to 255) can be seen."""
    materials = materials or MATERIALS
    seen = np.array(inks).reshape(-1, 3) / 255
    while True:
        material = materials[int(generator.integers(len(materials)))]
        dark, light = _TONES[material](generator)
        middle = (dark + light) / 2
        tones = np.stack([dark, middle, light])
        gaps = np.linalg.norm(tones[:, None] - seen, axis=-1)
        if gaps.size == 0 or gaps.min() > _APART:
            seed = int(generator.integers(1 << 31))
            return Ground(material, _colour(dark), _colour(light), seed)


def _colour(tone: np.ndarray) -> RGB:
    red, green, blue = (float(value) for value in tone)
    return red, green, blue


def _noise(generator: np.random.Generator, power: float, stretch: float = 1.0) -> Field:
    """Noise whose amplitude falls with frequency to `power`; `stretch` draws it out vertically."""
    across = np.fft.fftfreq(_GRAIN)[None, :]
    down = np.fft.fftfreq(_GRAIN)[:, None] * stretch
    frequency = np.maximum(np.hypot(across, down), 1 / _GRAIN)
    spectrum = np.fft.fft2(generator.normal(size=(_GRAIN, _GRAIN))) / frequency**power
    spectrum[0, 0] = 0
    field = np.fft.ifft2(spectrum).real
    found: Field = np.clip(0.5 + 0.22 * field / field.std(), 0, 1)
    return found


def _flat(generator: np.random.Generator) -> Field:
    """A slope of light in some direction."""
    angle = generator.uniform(0, 2 * math.pi)
    y, x = np.mgrid[0:_GRAIN, 0:_GRAIN] / _GRAIN - 0.5
    slope: Field = 0.5 + 0.7 * (x * math.cos(angle) + y * math.sin(angle))
    return slope


def _clouds(generator: np.random.Generator) -> Field:
    return _noise(generator, 1.6)


def _grass(generator: np.random.Generator) -> Field:
    return _noise(generator, 0.7, stretch=3.0)


def _sand(generator: np.random.Generator) -> Field:
    return _noise(generator, 0.4)


def _bricks(generator: np.random.Generator) -> Field:
    """Courses of bricks, every second one shifted by half; each brick has a tone of its own."""
    height = int(generator.integers(9, 15))
    width, start = 2 * height, generator.integers(0, 16, 2)
    y, x = np.mgrid[0:_GRAIN, 0:_GRAIN] + start[:, None, None]
    course = y // height
    brick = (x + course % 2 * height) // width
    tones = generator.uniform(0.1, 0.7, (_GRAIN, _GRAIN))
    is_joint = (y % height < 2) | ((x + course % 2 * height) % width < 2)
    return np.where(is_joint, 1.0, tones[course % _GRAIN, brick % _GRAIN])


def _water(generator: np.random.Generator) -> Field:
    """Waves across, bent by noise."""
    y, _ = np.mgrid[0:_GRAIN, 0:_GRAIN]
    waves = generator.uniform(5, 9)
    bent = 2 * math.pi * waves * y / _GRAIN + 5 * _noise(generator, 1.5)
    found: Field = 0.5 + 0.45 * np.sin(bent)
    return found


_PATTERNS: dict[str, Callable[[np.random.Generator], Field]] = {
    "flat": _flat,
    "clouds": _clouds,
    "grass": _grass,
    "bricks": _bricks,
    "water": _water,
    "sand": _sand,
}
MATERIALS = tuple(_PATTERNS)
PATTERNED = tuple(name for name in MATERIALS if name != "flat")
_USUAL: dict[str, tuple[RGB, RGB]] = {  # dark and light tone
    "clouds": ((0.52, 0.66, 0.80), (0.86, 0.90, 0.94)),
    "grass": ((0.40, 0.50, 0.30), (0.62, 0.70, 0.48)),
    "bricks": ((0.56, 0.40, 0.34), (0.78, 0.72, 0.66)),
    "water": ((0.36, 0.54, 0.60), (0.60, 0.76, 0.78)),
    "sand": ((0.68, 0.60, 0.46), (0.86, 0.80, 0.66)),
}


def _tones(material: str) -> Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]:
    dark, light = (np.array(tone) for tone in _USUAL[material])

    def drawn(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        change = generator.uniform(-_CHANGE, _CHANGE, 3)
        return np.clip(dark + change, 0, 1), np.clip(light + change, 0, 1)

    return drawn


def _any_colour(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    middle = generator.uniform(0.06, 0.94, 3)
    slope = generator.uniform(0, 0.06)
    return middle - slope, middle + slope


_TONES = {"flat": _any_colour, **{name: _tones(name) for name in _USUAL}}
