"""Backgrounds of scenes: materials painted from a seed.

Clouds, grass, bricks, water and sand are patterns on noise whose power falls with frequency; a flat
background is one colour with a weak linear gradient. Tones are seeded and keep a minimum distance
to the inks of the things in front of them, so that everything is visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

RGB = tuple[float, float, float]
Field = np.ndarray  # (S, S), about 0 to 1

_GRAIN = 96  # side of the noise in cells, for any image size
_MIN_CONTRAST = 0.42  # minimum distance of a tone to an ink, in the unit cube of RGB
_MIN_TINT, _MIN_TINT_CONTRAST = 0.8, 0.48  # of tints: minimum channel, minimum distance to an ink
_TONE_JITTER = 0.07  # maximum change of a material's tones, per channel


@dataclass(frozen=True)
class Background:
    """A material in two tones, its pattern drawn from `seed`."""

    material: str
    dark: RGB  # 0 to 1
    light: RGB
    seed: int

    def paint(self, side: int) -> Image.Image:
        """Paint the background on a square RGB image of `side` pixels."""
        share = _PATTERNS[self.material](np.random.default_rng(self.seed))[..., None]
        dark, light = np.array(self.dark), np.array(self.light)
        pixels = np.clip(dark + (light - dark) * share, 0, 1)
        picture = Image.fromarray((255 * pixels).round().astype(np.uint8))
        return picture.resize((side, side), Image.Resampling.BICUBIC)


@dataclass(frozen=True)
class Tiles:
    """One background per cell of a square board, row by row."""

    backgrounds: tuple[Background, ...]

    def paint(self, side: int) -> Image.Image:
        """Paint the tiles on a square RGB image of `side` pixels."""
        canvas, across = Image.new("RGB", (side, side)), math.isqrt(len(self.backgrounds))
        edges = [round(side * cut / across) for cut in range(across + 1)]
        for cell, background in enumerate(self.backgrounds):
            row, column = divmod(cell, across)
            high, wide = edges[row + 1] - edges[row], edges[column + 1] - edges[column]
            tile = background.paint(max(high, wide)).crop((0, 0, wide, high))
            canvas.paste(tile, (edges[column], edges[row]))
        return canvas


def sample_tint(generator: np.random.Generator, ink: tuple[int, int, int]) -> Background:
    """Sample a pale flat background on which an ink (0 to 255) is visible."""
    unit_ink = np.array(ink) / 255
    while True:
        tone = generator.uniform(_MIN_TINT, 1.0, 3)
        if np.linalg.norm(tone - unit_ink) > _MIN_TINT_CONTRAST:
            return Background(
                "flat", _colour(tone), _colour(tone), int(generator.integers(1 << 31))
            )


def sample_background(
    generator: np.random.Generator,
    inks: Sequence[tuple[int, int, int]],
    materials: Sequence[str] | None = None,
) -> Background:
    """Sample a background on which all `inks` (0 to 255) are visible; default: any material."""
    materials = materials or MATERIALS
    unit_inks = np.array(inks).reshape(-1, 3) / 255
    while True:
        material = materials[int(generator.integers(len(materials)))]
        dark, light = _sample_tones(material, generator)
        middle = (dark + light) / 2
        tones = np.stack([dark, middle, light])
        gaps = np.linalg.norm(tones[:, None] - unit_inks, axis=-1)
        if gaps.size == 0 or gaps.min() > _MIN_CONTRAST:
            seed = int(generator.integers(1 << 31))
            return Background(material, _colour(dark), _colour(light), seed)


def _colour(tone: np.ndarray) -> RGB:
    red, green, blue = (float(value) for value in tone)
    return red, green, blue


def _noise(generator: np.random.Generator, power: float, stretch: float = 1.0) -> Field:
    """Noise with amplitude 1 / frequency ** `power`, stretched vertically by `stretch`."""
    across = np.fft.fftfreq(_GRAIN)[None, :]
    down = np.fft.fftfreq(_GRAIN)[:, None] * stretch
    frequency = np.maximum(np.hypot(across, down), 1 / _GRAIN)
    spectrum = np.fft.fft2(generator.normal(size=(_GRAIN, _GRAIN))) / frequency**power
    spectrum[0, 0] = 0
    field = np.fft.ifft2(spectrum).real
    found: Field = np.clip(0.5 + 0.22 * field / field.std(), 0, 1)
    return found


def _flat(generator: np.random.Generator) -> Field:
    """A linear gradient in a random direction."""
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
    """Rows of bricks, every second one shifted by half a brick; each brick has its own tone."""
    height = int(generator.integers(9, 15))
    width, start = 2 * height, generator.integers(0, 16, 2)
    y, x = np.mgrid[0:_GRAIN, 0:_GRAIN] + start[:, None, None]
    course = y // height
    brick = (x + course % 2 * height) // width
    tones = generator.uniform(0.1, 0.7, (_GRAIN, _GRAIN))
    is_joint = (y % height < 2) | ((x + course % 2 * height) % width < 2)
    return np.where(is_joint, 1.0, tones[course % _GRAIN, brick % _GRAIN])


def _water(generator: np.random.Generator) -> Field:
    """Horizontal waves, distorted by noise."""
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
_TONES: dict[str, tuple[RGB, RGB]] = {  # dark and light tone
    "clouds": ((0.52, 0.66, 0.80), (0.86, 0.90, 0.94)),
    "grass": ((0.40, 0.50, 0.30), (0.62, 0.70, 0.48)),
    "bricks": ((0.56, 0.40, 0.34), (0.78, 0.72, 0.66)),
    "water": ((0.36, 0.54, 0.60), (0.60, 0.76, 0.78)),
    "sand": ((0.68, 0.60, 0.46), (0.86, 0.80, 0.66)),
}


def _sample_tones(
    material: str, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:  # (3,), (3,)
    """Sample the dark and the light tone of a material; any colour for "flat"."""
    if material == "flat":
        middle = generator.uniform(0.06, 0.94, 3)
        slope = generator.uniform(0, 0.06)
        return middle - slope, middle + slope
    dark, light = (np.array(tone) for tone in _TONES[material])
    change = generator.uniform(-_TONE_JITTER, _TONE_JITTER, 3)
    return np.clip(dark + change, 0, 1), np.clip(light + change, 0, 1)
