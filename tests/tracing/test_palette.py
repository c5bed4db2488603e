"""Colours of plots can be distinguished with any colour vision."""

from __future__ import annotations

from itertools import combinations

import pytest

from mmspec.tracing import palette

# linear RGB as seen without one kind of cones (Machado, Oliveira and Fernandes 2009, severity 1)
VISION = {
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
APART = 0.1  # in sRGB of 0 to 1; red (1, 0, 0) and brown (.5, .4, 0) are 0.03 apart to a protanope


def to_linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def to_srgb(value: float) -> float:
    value = min(max(value, 0.0), 1.0)
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055


def see(colour: tuple[int, int, int], matrix: tuple[tuple[float, ...], ...]) -> list[float]:
    linear = [to_linear(one / 255) for one in colour]
    return [to_srgb(sum(a * b for a, b in zip(row, linear, strict=True))) for row in matrix]


def distance(one: tuple[int, int, int], other: tuple[int, int, int], vision: str) -> float:
    pair = zip(see(one, VISION[vision]), see(other, VISION[vision]), strict=True)
    return float(sum((a - b) ** 2 for a, b in pair) ** 0.5)


@pytest.mark.parametrize("vision", VISION)
def test_series_can_be_distinguished_with_any_colour_vision(vision: str) -> None:
    for one, other in combinations(map(palette.to_rgb, palette.SERIES), 2):
        assert distance(one, other, vision) > APART, (one, other)


def test_the_measure_finds_red_and_brown_alike() -> None:
    assert distance((255, 0, 0), (128, 92, 0), "protan") < APART
