"""Colours of plots and images, distinguishable with any colour vision (Okabe and Ito 2008)."""

from __future__ import annotations

BLUE, VERMILION, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
ORANGE, SKY, YELLOW, GREY, BLACK = "#e69f00", "#56b4e9", "#f0e442", "#8a8f99", "#000000"
SERIES = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK)  # lines of a plot, in their order
LEAST_WIDTH = 512  # pixels of a sheet


def to_rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of "#rrggbb", 0 to 255."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue
